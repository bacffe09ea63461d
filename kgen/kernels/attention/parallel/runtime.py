"""Attention over sequences that are sharded over ranks, with torch.distributed and kernels for
parts.

Each rank attends with its own queries to its own keys, and then to the keys of others. The transfer
of the next step runs while a step computes. Parts are merged by their log-sum-exp, in float32.
Backward takes the same steps with the log-sum-exp of all keys. It sends dk and dv to the owners of
the keys.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import Disagreement, Told, Words, digest
from .call_plans import Kernels, by_default, check, stands_for
from .exchange import Steps, abandon, steps
from .key_gradients import KeyGradients
from .partial_sums import LOG2, Sum, run_of
from .planning import Pair, Plan, decoded
from .queries import Attended, Part, Queries
from .sharding import Interval, runs, without
from .transfers import Keys


@dataclass(frozen=True)
class Call:
    """One call on one rank.

    `given` has its buffers and numbers, and `cu_seqlens_q` and `cu_seqlens_k`, by name.
    """

    kernels: Kernels
    plan: Plan
    group: dist.ProcessGroup
    given: dict[str, Any]
    rank: int
    agreed: Callable[[], None]
    """Waits for all ranks, and raises `Disagreement` on all of them if their calls differ."""

    @property
    def learned(self) -> list[str]:
        """Names of the buffers with a gradient."""
        found = {name: buffer for name, buffer, _ in self.kernels.views}
        return list(dict.fromkeys(found[name] for name in self.kernels.learned))

    def arguments(self, pair: Pair) -> tuple[list[Tensor], dict[str, Any]]:
        """Return the arguments of a pair besides q, k and v: the starts of packed sequences, and
        the rest by name.
        """
        kernels, given = self.kernels, self.given
        runs = {"q": slice(*pair.q), "kv": slice(*pair.kv)}
        named = {n: given[n] for n in kernels.numbers if n in given}
        for name, buffer, sides in kernels.views:
            named[name] = given[buffer][
                tuple(runs[side] if side else slice(None) for side in sides)
            ]
        lengths = {"q_length": self.plan.q.length, "kv_length": self.plan.kv.length}
        places = lengths | {"q_start": pair.q[0], "kv_start": pair.kv[0]}
        packed: list[Tensor] = []
        if kernels.packed:
            places = {}
            for side, run in (("q", pair.q), ("kv", pair.kv)):
                starts = given[f"cu_seqlens_{side[0]}"]
                packed.append((starts.clamp(*run) - run[0]).contiguous())
                places[f"{side}_start"] = (run[0] - starts[:-1]).clamp(min=0)
                places[f"{side}_length"] = starts.diff()
        return packed, named | {name: places[name] for name in kernels.places}

    def apart(self, pair: Pair, free: Sequence[Interval]) -> Iterator[tuple[Pair, Interval, bool]]:
        """Split a pair by whether sinks join its rows, and yield each part with its rows and that
        flag.

        Sinks join the rows that are `free`: they have no part yet.
        """
        rows = self.plan.q.rows(self.rank, *pair.q)
        if not self.kernels.sinks:
            yield pair, rows, False
            return
        ahead = pair.q[0] - rows[0]
        for some, joined in ((free, True), (without([rows], free), False)):
            for lo, hi in some:
                yield replace(pair, q=(lo + ahead, hi + ahead)), (lo, hi), joined

    def operands(
        self, pair: Pair, module: Any, q: Tensor, k: Tensor, sinks: Tensor | None
    ) -> list[Any]:
        """Return the arguments of a pair's operators after q, k and v."""
        packed, named = self.arguments(pair)
        lists: Sequence[Tensor] = ()
        if self.kernels.listed:
            make = getattr(module, f"{self.kernels.name}_block_mask")
            asked = inspect.signature(make).parameters
            batch, heads, queries, _ = q.shape
            sizes = {"B": batch, "HQ": heads, "HKV": k.shape[1], "SQ": queries, "SK": k.shape[2]}
            sizes["device"] = q.device
            lists = make(**{n: x for n, x in {**sizes, **named}.items() if n in asked})[1:]
        tensors = [
            *(named[name] for name in self.kernels.tensors),
            *([] if sinks is None else [sinks]),
        ]
        numbers = [named[name] for name in self.kernels.numbers]
        return [*packed, *tensors, *lists, self.given["scale"], *numbers]

    def forward(
        self, pair: Pair, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return out and the base-2 log-sum-exp of a pair."""
        module = self.kernels.module(q, v)
        operands = self.operands(pair, module, q, k, sinks)
        with torch.no_grad():
            out, lse = module._out_and_lse_op(q, k, v, *operands)
        return out, lse

    def backward(
        self, part: Part, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor | None, Tensor, Tensor, list[tuple[str, tuple[slice, ...], Tensor]]]:
        """Return dq (None if it is shared), dk and dv of a pair, and the gradients of buffers and
        sinks.

        A gradient of a buffer is its name, the slice that the gradient belongs to, and the
        gradient.
        """
        pair, q = part.pair, part.q
        module = self.kernels.module(q, v)
        operands = self.operands(pair, module, q, k, sinks)
        function = module._backward_op
        if part.shared is not None:
            function = functools.partial(module._gradients, shared=part.shared)
        dq, dk, dv, *gradients = function(
            part.dout, part.dlse, part.out, part.lse, q, k, v, *operands
        )
        runs = {"q": slice(*pair.q), "kv": slice(*pair.kv), None: slice(None)}
        places = {
            name: (buffer, tuple(runs[side] for side in sides))
            for name, buffer, sides in self.kernels.views
        }
        learned = self.kernels.learned
        if sinks is not None:
            learned, places = (*learned, "sinks"), {**places, "sinks": ("sinks", (slice(None),))}
        named_gradients = zip(learned, gradients, strict=True)
        return dq, dk, dv, [(*places[name], gradient) for name, gradient in named_gradients]

    @contextmanager
    def agreeing(self, steps: Steps, home: KeyGradients | None = None) -> Iterator[None]:
        """Re-raise the local error if all ranks agree on the call. Otherwise raise `Disagreement`.

        If ranks agree, wait for the running transfers: later operations of gloo would block on a
        dropped one. If they do not agree, a transfer may have no other end, so do not wait.
        """
        try:
            yield
        except Exception:
            try:
                self.agreed()
            except Exception:
                abandon(steps)
                raise
            steps.close()
            if home is not None:
                home.wait()
            raise

    def keys(self, k: Tensor, v: Tensor) -> Keys:
        """Return the keys and values of this rank."""
        return Keys(self.plan, self.group, self.kernels.axis, k, v)

    def steps(self, keys: Keys, home: KeyGradients | None = None) -> Steps:
        """Yield the pairs of this rank with their keys and values: own keys first, then those of
        others.
        """
        return steps(keys, self.agreed, home)


# --- forward ------------------------


def forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return out and the base-2 log-sum-exp [.., H, S] of this rank's queries."""
    axis, handed = call.kernels.axis, _handed(sinks)
    total = Sum((*q.shape[:-1], v.shape[-1]), q, axis)
    steps = call.steps(call.keys(k, v))
    with call.agreeing(steps):
        for whole, keys, values in steps:
            free = total.free(call.plan.q.rows(call.rank, *whole.q))
            for pair, rows, joined in call.apart(whole, free):
                found = call.forward(pair, run_of(q, axis, rows), keys, values, handed(joined))
                total.add(rows, *found)
    out, lse = total.attended()
    if sinks is not None:
        lse.masked_fill_(lse <= NOTHING, -math.inf)  # a row without keys and without a sink
        for rows in total.free((0, q.shape[axis])):
            run_of(lse, -1, rows).copy_(
                (sinks.to(lse.dtype) / LOG2)[:, None].expand_as(run_of(lse, -1, rows))
            )
    return out, lse


def _handed(sinks: Tensor | None) -> Callable[[bool], Tensor | None]:
    """Return a function from a flag, whether sinks join a part, to the sinks that its kernels get.

    Kernels always need sinks: if these do not join, they get logits of `NOTHING`.
    """

    @functools.cache
    def handed(joined: bool) -> Tensor | None:
        return sinks if sinks is None or joined else torch.full_like(sinks, NOTHING)

    return handed


NOTHING = -1e30
"""A logit that any other one outweighs. Kernels cannot compute a softmax of -inf alone."""


# --- backward ------------------------


def backward(
    call: Call, attended: Attended, k: Tensor, v: Tensor, sinks: Tensor | None, reduce: bool = True
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Return dq, dk and dv of this rank, and the float32 gradients of buffers and sinks by name.

    `attended` has a base-2 lse, and dlse is the gradient with respect to it. With `reduce`, the
    gradients of buffers and sinks are summed over all ranks.
    """
    axis, given, handed = call.kernels.axis, call.given, _handed(sinks)
    q, dlse = attended.q, attended.dlse
    total_dq = Sum(q.shape, q, axis)
    own = Sum(k.shape, k, axis), Sum(v.shape, v, axis)
    learned = {
        buffer: torch.zeros_like(given[buffer], dtype=torch.float32) for buffer in call.learned
    }
    here = call.keys(k, v)
    home = KeyGradients(here, own)
    if sinks is not None:
        learned["sinks"] = torch.zeros_like(sinks, dtype=torch.float32)
    queries = Queries(call.plan, call.rank, axis, attended)
    kernels = call.kernels.module(q, v), call.kernels.name
    steps = call.steps(here, home)
    with call.agreeing(steps, home):
        for whole, keys, values in steps:
            if (of_sinks := queries.begin(*kernels, k, v, sinks, total_dq)) is not None:
                learned["sinks"] += of_sinks
            free = queries.unshared(total_dq.free(call.plan.q.rows(call.rank, *whole.q)))
            for pair, _, joined in call.apart(whole, free):
                part = queries.of(pair)
                dq, dk, dv, others = call.backward(part, keys, values, handed(joined))
                if dq is not None:
                    total_dq.add(part.rows, dq)
                home.add(pair, dk, dv)
                for buffer, place, gradient in others:
                    learned[buffer][place] += gradient
        queries.end(*kernels, given["scale"], total_dq)
        home.end()
    if sinks is not None and dlse is not None:  # rows without keys: their log-sum-exp is the sink
        for rows in total_dq.free((0, q.shape[axis])):
            alone = run_of(dlse, -1, rows) / LOG2
            alone = alone.masked_fill(torch.isinf(sinks)[:, None], 0.0)
            learned["sinks"] += alone.sum(-1) if alone.dim() == 2 else alone.sum((0, 2))
    for gradient in learned.values() if reduce else ():
        dist.all_reduce(gradient, group=call.group)
    return total_dq.result(), own[0].result(), own[1].result(), learned


# --- agreement ------------------------


def called(
    kernels: Kernels,
    group: str,
    numbers: Tensor | None,
    tensors: tuple[Tensor, Tensor, Tensor],
    given: dict[str, Any],
    *,
    back: bool,
    **alike: Any,
) -> Call:
    """Start a call that all ranks of a group make, each with its own q, k and v.

    numbers: a plan from `encoded`, or None if each rank has a run of positions. given: the buffers
    and numbers of the call by name. back: True for backward. alike: further values that all ranks
    must share.

    Raises:
        Disagreement: on all ranks, if they differ in a value that they must share, or if a rank is
            gone.
        ValueError: the plan is for another function or other sizes, or a tensor has a wrong shape.
    """
    ranks = dist.distributed_c10d._resolve_process_group(group)
    axis, rank, (q, k, v) = kernels.axis, dist.get_rank(ranks), tensors
    encoded = None if numbers is None else tuple(numbers.tolist())
    plan = None if encoded is None else decoded_once(encoded)
    rows = _rows(q, axis), _rows(k, axis), _rows(v, axis)
    shared = {"the pass": "backward" if back else "forward"}
    shared |= _shared(kernels, tensors, given, _of_plan(plan, encoded), alike)
    words = Words(ranks, q.device, rows, shared)
    dims = 3 if kernels.packed else 4
    if any(x.dim() != dims for x in tensors):
        words.heard()
        raise ValueError(
            f"q, k and v must have {dims} dimensions, got {[list(x.shape) for x in tensors]}"
        )
    sizes = q.shape[0], q.shape[1], k.shape[1]
    if plan is None:
        q_sharding, kv_sharding = (runs([pair[i] for pair in words.heard()]) for i in (0, 1))
        check(kernels, (q_sharding.length, kv_sharding.length), given)
        plan = by_default(kernels, q_sharding, kv_sharding, sizes, given)
        return Call(kernels, plan, ranks, given, rank, lambda: None)
    agreed = functools.partial(_agree, words, plan)
    if (
        rank >= plan.ranks
        or (plan.q.local(rank), plan.kv.local(rank)) != rows[:2]
        or rows[1] != rows[2]
    ):
        agreed()
    if plan.of != stands_for(kernels, given, sizes):
        agreed()
        raise ValueError(
            f"the plan was made for another function than {kernels.name.removesuffix('_part')}, or "
            "for other numbers "
            "or sizes: make a plan for "
            f"{dict(zip(('batch', 'heads', 'kv_heads'), sizes, strict=True))}"
        )
    check(kernels, (plan.q.length, plan.kv.length), given)
    return Call(kernels, plan, ranks, given, rank, agreed)


def _shared(
    kernels: Kernels,
    tensors: Sequence[Tensor],
    given: Mapping[str, Any],
    plan: Told,
    alike: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the values that ranks must share in a call, by their name in error messages."""
    axis = kernels.axis
    shapes = [tuple(x.shape[:axis]) + tuple(x.shape[axis + 1 :]) for x in tensors]
    return {
        "shapes and dtypes of q, k and v": (shapes, [_kind(x) for x in tensors]),
        "the plan": plan,
        "numbers": [(n, given[n]) for n in ("scale", *kernels.numbers) if n in given],
        "shapes and dtypes of buffers": [
            (n, tuple(x.shape), _kind(x)) for n, x in given.items() if isinstance(x, Tensor)
        ],
        "tensors that plans read": _read(kernels, given) if plan.alike is None else "nothing",
        "other arguments": [
            (n, (tuple(x.shape), _kind(x)) if isinstance(x, Tensor) else x)
            for n, x in alike.items()
        ],
    }


def _agree(words: Words, plan: Plan) -> None:
    """Wait for the descriptions of all ranks.

    Raise on all ranks if they differ, or differ from the plan's rows.
    """
    heard = words.heard()
    if plan.ranks != len(heard):
        raise ValueError(
            f"the plan is for {plan.ranks} ranks, the group has {len(heard)}: make a plan for this "
            "group"
        )
    wanted = [(plan.q.local(r), plan.kv.local(r)) for r in range(plan.ranks)]
    if wanted != heard:
        raise Disagreement(
            f"expected (queries, keys) of {wanted}, by rank, as in the plan, got {heard}"
        )


def _rows(x: Tensor, axis: int) -> int:
    """Return the number of rows of a tensor; 0 if it has too few dimensions."""
    return x.shape[axis] if axis < x.dim() else 0


def _kind(x: Tensor) -> tuple[str, str]:
    return str(x.dtype), x.device.type


def _of_plan(plan: Plan | None, encoded: tuple[int, ...] | None) -> Told:
    if plan is None or encoded is None:
        return Told("none", None)
    return Told(f"one of {plan.q.length} positions over {plan.ranks} ranks", _named(encoded))


def _read(kernels: Kernels, given: Mapping[str, Any]) -> Told:
    """Return digests of the tensors that each rank's plan depends on."""
    names = [*kernels.reads, *(["cu_seqlens_q", "cu_seqlens_k"] if kernels.packed else ())]
    found = {n: digest(given[n].tolist()) for n in names if isinstance(given.get(n), Tensor)}
    return Told(f"the elements of {', '.join(found) or 'nothing'}", found)


decoded_once = functools.lru_cache(256)(decoded)


@functools.lru_cache(256)
def _named(plan: tuple[int, ...]) -> int:
    """Return a digest of a plan."""
    return digest(plan)
