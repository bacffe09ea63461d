"""Linear attention over sequences that are sharded over ranks, with torch.distributed.

The state after the tokens of a rank is linear in the state before them: a matrix or a decay times
the earlier state, plus the state that the rank computes from zeros. Ranks compute these terms at
the same time, and gather them. Then each rank combines the terms of earlier ranks, in their order.
It calls the kernels with the state before its tokens. Backward does the same with the gradients of
states, from the last rank to the first.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .agreement import Told, Words
from .groups import resolved
from .kernels import Kernels, Tokens
from .shares import Share, of_packed, of_rows


@dataclass(frozen=True)
class Options:
    """The arguments of a call besides its tensors.

    group: the name of the process group.
    final: True to return the final states.
    reduce: True to sum gradients over ranks.
    """

    scale: float
    final: bool
    group: str
    reduce: bool = False


@dataclass(frozen=True)
class Call:
    """One call on one rank. `count` is the number of sequences of all ranks."""

    options: Options
    tokens: Tokens
    shares: tuple[Share, ...]
    count: int

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """The process group."""
        return resolved(self.options.group)

    @cached_property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return int(dist.get_rank(self.group))

    @property
    def share(self) -> Share:
        """The sequences of this rank."""
        return self.shares[self.rank]

    @property
    def crosses(self) -> bool:
        """True if a sequence lies on several ranks."""
        return any(share.leaves for share in self.shares)

    def zeros(self, count: int) -> Tensor:
        """Return the states of `count` sequences, zeros."""
        shape = (count, *self.tokens.state_shape)
        return self.tokens.tensors[0].new_zeros(shape, dtype=torch.float32)

    @property
    def begun(self) -> slice:
        """The sequences of the batch that begin on this rank."""
        share = self.share
        return slice(share.first + (share.crossing if share.enters else 0), share.last)

    def states(self, initial: Tensor | None) -> Tensor | None:
        """Return the states before the sequences of this rank. Those of other ranks are zeros."""
        if initial is None and not self.share.enters:
            return None
        found = self.zeros(self.share.sequences)
        if initial is not None:
            first, last = (i - self.share.first for i in (self.begun.start, self.begun.stop))
            found[first:last] = initial[self.begun]
        return found


# --- transfers ------------------------


def gathered(group: dist.ProcessGroup, own: Tensor) -> Tensor:
    """Return the vectors of all ranks, [ranks, size]."""
    found = own.new_empty(dist.get_world_size(group), own.numel())
    dist.all_gather(list(found), own, group=group)
    return found


def received(
    call: Call, sent: Tensor | None, factor: Tensor | None, *, back: bool = False
) -> Tensor | None:
    """Return the states [crossing, HV, K, V] that enter this rank, or None if none do.

    sent: the states that leave this rank, without the part that passes through it.
    factor: the factor of this part, a matrix or a decay. None if nothing passes through.
    back: True for gradients of states, which go from later ranks to earlier ones.
    """
    if not call.crosses:
        return None
    shape = (call.share.crossing, *call.tokens.state_shape)
    width = _factor_shape(call)
    own = call.zeros(shape[0]) if sent is None else sent
    parts = [own.flatten()]
    if width is not None:
        parts.append(own.new_zeros(width).flatten() if factor is None else factor.flatten())
    there = gathered(call.group, torch.cat(parts))
    state, size = None, own.numel()
    others = reversed(range(call.rank + 1, len(call.shares))) if back else range(call.rank)
    for rank in others:
        share = call.shares[rank]
        if not (share.enters if back else share.leaves):
            continue
        found = there[rank, :size].view(shape)
        if share.carries and state is not None:
            through = None if width is None else there[rank, size:].view(width)
            found = found + _passed(call, through, state, back)
        state = found
    return state


def _factor_shape(call: Call) -> tuple[int, ...] | None:
    """Return the shape of the factors of states, or None if no state needs one."""
    kernels, (heads, K, _) = call.tokens.kernels, call.tokens.state_shape
    if not any(share.carries for share in call.shares):
        return None
    if kernels.delta:
        return call.share.crossing, heads, K, K
    return None if kernels.decay is None else (call.share.crossing, heads, kernels.rows_of(K), 1)


def _passed(call: Call, factor: Tensor | None, state: Tensor, back: bool) -> Tensor:
    """Return the state after the tokens of a rank, or the gradient before them."""
    if factor is None:
        return state
    if call.tokens.kernels.delta:
        return (factor.mT if back else factor) @ state
    return factor * state


def summed(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the sums of tensors over ranks, in float32 and in the order of ranks."""
    if not tensors:
        return []
    there = gathered(group, torch.cat([x.float().flatten() for x in tensors]))
    total = there[0].clone()
    for one in there[1:]:
        total += one
    parts = total.split([x.numel() for x in tensors])
    return [part.view(x.shape).to(x.dtype) for part, x in zip(parts, tensors, strict=True)]


# --- forward ------------------------


@dataclass(frozen=True)
class Done:
    """The results of a rank's forward pass.

    final: the states after its sequences.
    state: the states before its tokens.
    factor: the factor of a state that passes through.
    saved: the tensors that the kernels keep for backward.
    """

    o: Tensor
    final: Tensor
    state: Tensor | None
    factor: Tensor | None
    saved: list[Tensor]


def forward(call: Call, initial: Tensor | None) -> Done:
    """Call the kernels with the states of earlier ranks."""
    share, state = call.share, call.states(initial)
    sent, factor = _sent(call, state) if share.leaves else (None, None)
    entering = received(call, sent, factor)
    if share.enters:
        assert state is not None
        assert entering is not None
        state[share.entering] = entering
    o, final, saved = call.tokens.forward(state)
    return Done(o, final, state, factor, saved)


def _sent(call: Call, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the states that leave a rank, without the part that passes through, and its factor.

    The first rank also computes them before its output, because other ranks wait for them.
    """
    share, tokens = call.share, call.tokens
    if share.carries:
        final, decay = tokens.final(None)
        return final, tokens.transition() if tokens.kernels.delta else decay
    if tokens.kernels.packed:
        tokens = tokens.run(share.starts[-2], share.starts[-1])
        state = None if state is None else state[share.leaving].contiguous()
    return tokens.final(state)[0], None


# --- backward ------------------------


def backward(
    call: Call,
    changes: tuple[Tensor, Tensor | None],
    state: Tensor | None,
    factor: Tensor | None,
    saved: Sequence[Tensor],
) -> tuple[list[Tensor], Tensor]:
    """Return the gradients of q, k, v and learned buffers, and of the states before the tokens.

    changes: the gradients of the output, and of the final states of all sequences.
    """
    share, tokens, (do, dwhole) = call.share, call.tokens, changes
    dfinal = None
    if share.leaves or dwhole is not None:
        dfinal = call.zeros(share.sequences)
        if dwhole is not None:
            dfinal[: share.ended - share.first] = dwhole[share.first : share.ended]
    sent = None
    if not share.leaves:
        grads, dstate = tokens.backward(do, dfinal, state, saved)
        sent = dstate[share.entering] if share.enters else None
    elif share.enters:
        sent = _sent_back(call, do, dfinal, state, saved)
    entering = received(call, sent, factor, back=True)
    if share.leaves:
        assert dfinal is not None
        assert entering is not None
        dfinal[share.leaving] = entering
        grads, dstate = tokens.backward(do, dfinal, state, saved)
    return grads, dstate


def _sent_back(
    call: Call,
    do: Tensor,
    dfinal: Tensor | None,
    state: Tensor | None,
    saved: Sequence[Tensor],
) -> Tensor:
    """Return the gradients of the entering states, without the part that passes through."""
    share, tokens = call.share, call.tokens
    if share.carries:
        return tokens.backward(do, None, state, saved)[1]
    assert state is not None
    assert dfinal is not None
    end = share.starts[1]
    # The chunks of the first packed sequence come first, with one slot for a short chunk.
    slots = end // tokens.kernels.chunk + 1
    pairs = zip(saved, tokens.kernels.saved, strict=True)
    own = [x[:, :end].contiguous() if by_token else x[:slots] for x, by_token in pairs]
    first = dfinal[share.entering].contiguous(), state[share.entering].contiguous()
    return tokens.run(0, end).backward(do[:, :end], *first, own)[1]


# --- the function ------------------------


class _OverRanks(torch.autograd.Function):  # type: ignore[misc]
    """The output and the final states, and their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        options: Options,
        cu_seqlens: Tensor | None,
        initial: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        call = _agreed(kernels, options, cu_seqlens, initial, tensors)
        done = forward(call, initial)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(done.state, done.factor, *tensors, *done.saved)
        ctx.call, ctx.given = _with(call, ()), initial is not None
        if not options.final:
            return done.o, None
        whole, share = call.zeros(call.count), call.share
        whole[share.first : share.ended] = done.final[: share.ended - share.first]
        dist.all_reduce(whole, group=call.group)
        return done.o, whole

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, do: Tensor | None, dwhole: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        kernels, options = call.tokens.kernels, call.options
        state, factor, *rest = ctx.saved_tensors
        tensors, saved = rest[: len(kernels.by_token)], rest[len(kernels.by_token) :]
        call = _with(call, tuple(tensors))
        rows = tensors[0].shape[1]
        said = {"the pass": "backward", "the function": kernels.name}
        Words(call.group, tensors[0].device, (rows, rows, rows), said).heard()
        if options.final:
            dwhole = call.zeros(call.count) if dwhole is None else dwhole.float().clone()
            dist.all_reduce(dwhole, group=call.group)
        do = torch.zeros_like(tensors[2]) if do is None else do
        grads, dstate = backward(call, (do, dwhole), state, factor, saved)
        dinitial = None
        if ctx.given:
            dinitial, first = call.zeros(call.count), call.share.first
            dinitial[call.begun] = dstate[call.begun.start - first : call.begun.stop - first]
            if options.reduce:
                dist.all_reduce(dinitial, group=call.group)
        return None, None, None, dinitial, *_by_operand(call, grads)


def _with(call: Call, tensors: tuple[Tensor, ...]) -> Call:
    """Return the call with its tensors, which autograd keeps."""
    old = call.tokens
    tokens = Tokens(old.kernels, tensors, old.starts, old.scale)
    return Call(call.options, tokens, call.shares, call.count)


def _by_operand(call: Call, grads: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradient of each tensor. Gradients of buffers without tokens are summed."""
    kernels = call.tokens.kernels
    places = [0, 1, 2, *(3 + i for i in kernels.learned)]
    found: list[Tensor | None] = [None] * len(kernels.by_token)
    for place, grad in zip(places, grads, strict=True):
        found[place] = grad
    if call.options.reduce:
        shared = [place for place in places if not kernels.by_token[place]]
        parts = [grad for grad, place in zip(grads, places, strict=True) if place in shared]
        for place, total in zip(shared, summed(call.group, parts), strict=True):
            found[place] = total
    return found


def _agreed(
    kernels: Kernels,
    options: Options,
    cu_seqlens: Tensor | None,
    initial: Tensor | None,
    tensors: tuple[Tensor, ...],
) -> Call:
    """Return the call, after all ranks have agreed on it."""
    q, group = tensors[0], resolved(options.group)
    rows, batch = q.shape[1], q.shape[0]
    starts = () if cu_seqlens is None else tuple(cu_seqlens.tolist())
    pairs = zip(tensors, kernels.by_token, strict=True)
    said = {
        "the pass": "forward",
        "the function": kernels.name,
        "shapes without tokens and dtypes": [
            ([*x.shape[:1], *x.shape[2:]] if by_token else [*x.shape], str(x.dtype))
            for x, by_token in pairs
        ],
        "cu_seqlens": Told(f"a list of {len(starts)} offsets", starts),
        "scale": options.scale,
        "the use of initial_state": initial is not None,
        "output_final_state": options.final,
        "reduce_gradients": options.reduce,
    }
    heard = Words(group, q.device, (rows, rows, rows), said).heard()
    lengths = [length for length, _ in heard]
    shares = of_packed(lengths, starts) if kernels.packed else of_rows(len(lengths), batch)
    count = len(starts) - 1 if kernels.packed else batch
    own = shares[dist.get_rank(group)].starts
    tokens = Tokens(kernels, tensors, own, options.scale)
    return Call(options, tokens, tuple(shares), count)


def require_local(name: str, *tensors: object) -> None:
    """Raise `TypeError` for a DTensor: gradients of its other mesh dimensions would be lost."""
    from torch.distributed.tensor import DTensor

    if any(isinstance(x, DTensor) for x in tensors):
        raise TypeError(f"{name}: expected local tensors, got a DTensor: pass x.to_local()")


def over_ranks(
    kernels: Kernels,
    tensors: Sequence[Tensor],
    cu_seqlens: Tensor | None,
    initial: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor | None]:
    """Return the output for the tokens of this rank, and the final states of all sequences.

    tensors: q, k, v and the buffers, those with tokens for the tokens of this rank.
    initial: the states before all sequences, the same on all ranks.

    Raises:
        Disagreement: on all ranks, if their calls differ or a rank is gone.
        ValueError: `cu_seqlens` has wrong values.
    """
    state = None if initial is None else initial.float()
    o, final = _applied()(kernels, options, cu_seqlens, state, *tensors)
    return o, None if final is None else final.to(kernels.state_dtype)


# Dynamo does not trace this function. The attribute is that of torch.compiler.disable, which would
# import all of torch.compile here.
over_ranks._torchdynamo_disable = True  # type: ignore[attr-defined]


def _applied() -> Callable[..., Any]:
    """Return the function with gradients. Dynamo, if it is loaded, does not trace its calls."""
    apply: Callable[..., Any] = _OverRanks.apply
    return _untraced(apply) if "torch._dynamo" in sys.modules else apply


@functools.cache
def _untraced(apply: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compiler.disable(apply)  # type: ignore[no-any-return]
