"""Reference of linear attention on plain PyTorch: the recurrence token by token, in float64.

The trees are evaluated as written, buffers are read at their indices, and autograd computes all
gradients. No code is shared with the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from kgen.expr.nodes import Node
from kgen.kernels.linear_attention.verify.problem import Buffer, Problem
from kgen.verify.evaluate import evaluate
from kgen.verify.tensors import DTYPES

STATE = "initial_state"
"""The argument with the states before the first tokens."""


@dataclass(frozen=True)
class Call:
    """The options of a call.

    `lengths` are the lengths of packed sequences; without them, each row of the batch is one
    sequence. With `cotangents` of `o` or `final_state`, gradients of the inputs in `wanted` are
    computed. With `every`, states within sequences are returned.
    """

    lengths: Sequence[int] | None = None
    scale: float | None = None
    cotangents: Mapping[str, Tensor] = field(default_factory=dict)
    wanted: Sequence[str] = ()
    every: int | None = None
    """The number of tokens between two returned states."""


PLAIN = Call()


@dataclass(frozen=True)
class Result:
    """The output `o` [B, T, HV, V], `final_state` [N, HV, K, V], and gradients by name.

    `states` are those after each `every` tokens of a sequence, and the last one. Their layout is
    that of `states_within`.
    `natural` has the gradients of buffers if no terms cancelled, from the recurrence only. `parts`
    has the gradients of buffers without tokens before the sum over tokens, [tokens, HV, columns].
    `unrounded` has the gradients in float32 before they are stored, from the eager computation.
    """

    o: Tensor
    final_state: Tensor
    grads: Mapping[str, Tensor] = field(default_factory=dict)
    natural: Mapping[str, Tensor] = field(default_factory=dict)
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    unrounded: Mapping[str, Tensor] = field(default_factory=dict)
    states: Tensor | None = None


@dataclass
class Tokens:
    """The L tokens of one sequence, in the precision of the computation.

    q, k: [L, HV, K], after feature maps and norm; v: [L, HV, V]. `decay` [L, HV, 1 or K] is the
    natural logarithm of the factor of the state. `beta` is [L, HV, 1]. `skip` [L, HV, V] is a term
    of the output. `output_gate` [L, HV, V] is its factor before the norm. `expression` computes the
    output from its value after the norm. Each of the five is None if the spec has none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    beta: Tensor | None
    skip: Tensor | None
    output_gate: Tensor | None
    expression: Callable[[Tensor], Tensor] | None
    state: Tensor
    """The state before the first token, [HV, K, V]."""
    delta: bool
    scale: float
    terms: dict[str, Tensor] = field(default_factory=dict)
    """Sizes of the gradients of `decay` [L, HV, K] and `beta` [L, HV, 1]. The backward pass of the
    recurrence fills them in.
    """
    every: int | None = None
    """The number of tokens between two recorded states."""
    states: list[Tensor] = field(default_factory=list)
    """The recorded states."""
    output: Tensor | None = None
    """The result of `expression`, which depends only on the buffers that the expression reads."""

    def record(self, end: int, state: Tensor) -> None:
        """Record the state before token `end`, if the call asks for it."""
        if self.every is not None and (end % self.every == 0 or end == self.length):
            self.states.append(state.detach())

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.v)


Steps = Callable[[Tokens], tuple[Tensor, Tensor]]
"""A function that returns the output without `skip`, [L, HV, V], and the state after the tokens."""


def linear_attention(problem: Problem, inputs: Mapping[str, Tensor], call: Call = PLAIN) -> Result:
    """Compute outputs, and gradients in `call.wanted`, by the recurrence in float64.

    - q, k: [B, T, H, K]; v: [B, T, HV, V].
    - buffers by name, with a batch dimension in front of T.
    - `initial_state`, if the call has one: [N, HV, K, V] for N sequences.
    """
    leaves = {n: x.detach().double().requires_grad_(n in call.wanted) for n, x in inputs.items()}
    return computed(problem, leaves, call, recurrence, torch.float64)


def recurrence(one: Tokens) -> tuple[Tensor, Tensor]:
    """Step the state token by token."""
    state, outputs = one.state, [one.v[:0]]
    for t in range(one.length):
        k, v = one.k[t][:, None], one.v[t][:, None]
        if one.decay is not None:
            state = one.decay[t].exp()[:, :, None] * state
            _watch(one, "decay", t, state, state)
        # The delta rule replaces the value that the state has for the key.
        written = v - k @ state if one.delta else v
        if one.beta is not None:
            value, written = written, one.beta[t][:, :, None] * written
            _watch(one, "beta", t, written, value)
        state = torch.baddbmm(state, k.mT, written)
        outputs.append(one.scale * (one.q[t][:, None] @ state).transpose(0, 1))
        one.record(t + 1, state)
    return torch.cat(outputs), state


def _watch(one: Tokens, name: str, t: int, of: Tensor, value: Tensor) -> None:
    """Record the size of a gradient at token t: the norm of the terms, the gradient of `of` times
    `value`.
    """
    if name not in one.terms or not of.requires_grad:
        return
    into, value = one.terms[name], value.detach()

    def record(gradient: Tensor) -> None:
        into[t] = (gradient * value).norm(dim=-1)

    of.register_hook(record)


# --- sequences ------------------------

_Place = tuple[Tensor, Tensor]


def computed(
    problem: Problem, leaves: Mapping[str, Tensor], call: Call, steps: Steps, real: Any
) -> Result:
    """Compute each sequence by `steps`, and gradients by autograd. Expressions have dtype
    `real`.
    """
    of, found = outputs(problem, leaves, call, steps, real)
    pairs = {n: (of[n], x.to(of[n])) for n, x in call.cotangents.items() if of[n].requires_grad}
    states = states_within(problem, found, call.every, leaves) if call.every else None
    result = Result(of["o"].detach(), of["final_state"].detach(), states=states)
    if call.wanted and pairs:
        return _differentiated(problem, leaves, call.wanted, pairs, found, result)
    return replace(result, grads={name: torch.zeros_like(leaves[name]) for name in call.wanted})


def outputs(
    problem: Problem, leaves: Mapping[str, Tensor], call: Call, steps: Steps, real: Any
) -> tuple[dict[str, Tensor], list[tuple[_Place, Tokens]]]:
    """Return `o` and `final_state`, and the sequences with the places of their tokens in [B, T]."""
    (B, T, _, K), (HV, V) = leaves["q"].shape, leaves["v"].shape[2:]
    o = torch.zeros(B, T, HV, V, dtype=leaves["v"].dtype, device=leaves["v"].device)
    states, found = [], list(_sequences(problem, leaves, call, real))
    for place, one in found:
        if call.wanted and steps is recurrence:
            one.terms["decay"] = torch.zeros_like(one.k)
            one.terms["beta"] = torch.zeros_like(one.k[..., :1])
        out, state = steps(one)
        out = out if one.skip is None else out + one.skip
        if problem.finishes:
            out = finished(problem, one, out.to(o.dtype).to(real))
        o = o.index_put(place, out.to(o.dtype))
        states.append(state.to(real if real == torch.float64 else DTYPES[problem.state_dtype]))
    final = torch.stack(states) if states else torch.zeros(0, HV, K, V, device=o.device)
    return {"o": o, "final_state": final}, found


def finished(problem: Problem, one: Tokens, out: Tensor) -> Tensor:
    """Apply the gate, the norm and the expression to outputs [L, HV, V]."""
    if one.output_gate is not None:
        out = out * one.output_gate
    if problem.output_eps is not None:
        out = out / (out.square().mean(-1, keepdim=True) + problem.output_eps).sqrt()
    if one.expression is not None:
        one.output = one.expression(out.detach())
        out = one.expression(out)
    return out


def states_within(
    problem: Problem,
    found: Sequence[tuple[_Place, Tokens]],
    every: int,
    leaves: Mapping[str, Tensor],
) -> Tensor:
    """Return the recorded states, [B, cdiv(T, every), HV, K, V].

    For chunks of N packed sequences, [T // every + N, HV, K, V]: sequence n begins at
    `cu_seqlens[n] // every + n`. Entries without tokens are zero.
    """
    (B, T, _, K), (HV, V) = leaves["q"].shape, leaves["v"].shape[2:]
    slots = problem.varlen and every > 1
    size = (1, T // every + len(found)) if slots else (B, -(-T // every))
    made = torch.zeros(*size, HV, K, V, dtype=found[0][1].state.dtype, device=leaves["q"].device)
    for n, ((rows, tokens), one) in enumerate(found):
        if one.length:
            row, first = int(rows[0]), int(tokens[0]) // every + (n if slots else 0)
            made[row, first : first + len(one.states)] = torch.stack(one.states)
    return made[0] if slots else made


def _sequences(
    problem: Problem, leaves: Mapping[str, Tensor], call: Call, real: Any
) -> Iterator[tuple[_Place, Tokens]]:
    """Yield each sequence, with the indices of its tokens in [B, T]."""
    (B, T), device = leaves["q"].shape[:2], leaves["q"].device
    lengths = [T] if call.lengths is None else call.lengths
    state = leaves.get(STATE)
    for b in range(B):
        begin = 0
        for n, length in enumerate(lengths):
            rows = slice(begin, begin + length)
            before = None if state is None else state[b if call.lengths is None else n]
            own = {name: _cut(problem, name, x, b, rows) for name, x in leaves.items()}
            at = torch.arange(begin, begin + length, device=device)
            yield (torch.full_like(at, b), at), _tokens(problem, own, before, call, real)
            begin += length


def gates(problem: Problem, tensors: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Return the natural logarithm of the decays, [B, T, HV, 1 or K], and beta [B, T, HV, 1]."""
    found = [one for _, one in _sequences(problem, tensors, PLAIN, torch.float32)]

    def stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
        there = [part for part in parts if part is not None]
        return torch.stack(there) if there else None

    return stacked([one.decay for one in found]), stacked([one.beta for one in found])


def _cut(problem: Problem, name: str, x: Tensor, b: int, rows: slice) -> Tensor:
    """Return the tokens of one sequence, without the batch. Other tokens may be NaN."""
    shared = {buffer.name for buffer in problem.buffers if not buffer.tokens} | {STATE}
    return x if name in shared else x[b, rows]


def _tokens(
    problem: Problem, own: Mapping[str, Tensor], before: Tensor | None, call: Call, real: Any
) -> Tokens:
    (length, H, K), (HV, V), device = own["q"].shape, own["v"].shape[1:], own["q"].device
    scales = (call.scale, problem.scale, K**-0.5)
    q, k = (_features(problem, name, own[name], real) for name in ("q", "k"))
    index = {
        "t": torch.arange(length, device=device)[:, None, None],
        "h": torch.arange(HV, device=device)[:, None],
        "c": torch.arange(1, device=device),
    }
    env: dict[str, Any] = {**own, **index, "H": H, "HV": HV}

    def value(tree: Node | None, columns: int, **more: Tensor) -> Tensor | None:
        if tree is None:
            return None
        at = torch.arange(columns, device=device)
        return evaluate(tree, {**env, "c": at, **more}, torch, real).expand(length, HV, columns)

    decay = value(problem.decay, K if problem.by_column else 1)
    return Tokens(
        q=q.repeat_interleave(HV // H, 1),
        k=k.repeat_interleave(HV // H, 1),
        v=own["v"],
        decay=None if decay is None else decay * (1.0 if problem.gate_base == "e" else math.log(2)),
        beta=value(problem.beta, 1),
        skip=value(problem.skip, V, v=own["v"].to(real)),
        output_gate=value(problem.output_gate, V),
        expression=None
        if problem.output is None
        else lambda o: cast(Tensor, value(problem.output, V, o=o)),
        state=torch.zeros(HV, K, V, dtype=real, device=device)
        if before is None
        else before.to(real),
        delta=problem.delta,
        scale=next(scale for scale in scales if scale is not None),
        every=call.every,
    )


def _features(problem: Problem, name: str, x: Tensor, real: Any) -> Tensor:
    """Apply the feature map and the norm; the result has the dtype of x."""
    tree, found = getattr(problem, f"{name}_map"), x.to(real)
    if tree is not None:
        found = evaluate(tree, {"x": found}, torch, real).expand(x.shape)
    if problem.norm_eps is not None:
        found = found / (found.square().sum(-1, keepdim=True) + problem.norm_eps).sqrt()
    return found.to(x.dtype)


# --- gradients ------------------------

_INNER = ("q", "k", "decay", "beta", "skip", "output_gate")
_OPTIONS = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}


def _differentiated(
    problem: Problem,
    leaves: Mapping[str, Tensor],
    wanted: Sequence[str],
    outputs: Mapping[str, tuple[Tensor, Tensor]],
    found: Sequence[tuple[_Place, Tokens]],
    result: Result,
) -> Result:
    """Add gradients to a result. `outputs` has pairs of an output and its cotangent."""
    of, cotangents = zip(*outputs.values(), strict=True)
    inner = [
        [x for x in (getattr(one, name) for name in _INNER) if x is not None and x.requires_grad]
        for _, one in found
    ]
    every = [leaves[name] for name in wanted] + [x for some in inner for x in some]
    # One pass for all sequences: each pass runs through every token.
    changes = torch.autograd.grad(of, every, cotangents, **_OPTIONS)
    by_id = {id(x): change for x, change in zip(every, changes, strict=True)}
    squares: dict[str, Tensor] = {}
    parts: dict[str, list[Tensor]] = {}
    for place, one in found:
        if one.terms:
            # Kernels compute the gradient of a decay from these products, which mostly cancel.
            products = [x.detach() * by_id[id(x)] for x in (one.q, one.k) if id(x) in by_id]
            one.terms["decay"] = _norm(one.terms["decay"], *products)
        of_value = _changes(one, by_id, outputs["o"][1][place] if "o" in outputs else None)
        if one.terms and "o" in outputs:
            one.terms |= {n: x for n, x in of_value.items() if n not in ("decay", "beta")}
        own: dict[str, Tensor] = {}
        for name, buffer, slope in _slopes(problem, leaves, wanted, one):
            terms = one.terms.get(name)
            if terms is not None:
                at = place if buffer.tokens else ()
                whole = squares.setdefault(buffer.name, torch.zeros_like(leaves[buffer.name]))
                sized = ("K", problem.chunk_size) if name == "decay" else ("V", 1)
                whole[at] += _squared(slope, terms, buffer, *sized)
            if not buffer.tokens:
                own[buffer.name] = _added(own.get(buffer.name), slope * of_value[name])
        for n, part in own.items():
            parts.setdefault(n, []).append(part)
    return replace(
        result,
        grads={name: by_id[id(leaves[name])] for name in wanted},
        natural={name: whole.detach().sqrt() for name, whole in squares.items()},
        parts={name: torch.cat(some).detach() for name, some in parts.items()},
    )


_VALUES = ("decay", "beta", "skip", "output_gate")


def _changes(one: Tokens, by_id: Mapping[int, Tensor], change: Tensor | None) -> dict[str, Tensor]:
    """Return the gradients of the values of expressions. `change` is the gradient of o."""
    values = {name: getattr(one, name) for name in _VALUES}
    found = {name: by_id[id(x)] for name, x in values.items() if id(x) in by_id}
    if one.output is None:
        return found
    return found | {"output": torch.zeros_like(one.output) if change is None else change}


def _added(one: Tensor | None, other: Tensor) -> Tensor:
    """Return the sum of two parts of the gradient of a buffer, perhaps of different columns."""
    if one is None:
        return other
    if one.shape != other.shape:
        one, other = one.sum(-1, keepdim=True), other.sum(-1, keepdim=True)
    return one + other


def _slopes(
    problem: Problem, leaves: Mapping[str, Tensor], wanted: Sequence[str], one: Tokens
) -> Iterator[tuple[str, Buffer, Tensor]]:
    """Yield each expression of one sequence and a buffer in it, with the derivative of each
    element.
    """
    for name in (*_VALUES, "output"):
        value = getattr(one, name)
        for buffer in problem.read_by(name):
            if one.length and buffer.name in wanted and value.requires_grad:
                yield name, buffer, _slope(value, leaves[buffer.name])


def _squared(slope: Tensor, terms: Tensor, buffer: Buffer, columns: str, chunk: int) -> Tensor:
    """Return the squared size of the gradient of a buffer in one sequence.

    The errors of `chunk` tokens add up: the gradient of a decay is a sum over later tokens.
    """
    found = slope * (terms if terms.shape == slope.shape else _norm(terms, dim=-1))
    if not buffer.tokens:
        found = torch.stack([part.abs().sum(0) for part in found.split(chunk)])
    found = found.square()
    for axis, name in ((2, columns), (1, "HV"), (0, "T")):
        if name not in buffer.shape:
            found = found.sum(axis)
    return found


def _slope(value: Tensor, leaf: Tensor) -> Tensor:
    """Return the derivative of each element of a value, if it depends on one element of a leaf."""
    weights = torch.ones_like(value, requires_grad=True)
    (sums,) = torch.autograd.grad(value, leaf, weights, create_graph=True, **_OPTIONS)
    if not sums.requires_grad:
        return torch.zeros_like(value)
    (slope,) = torch.autograd.grad(sums.sum(), weights, **_OPTIONS)
    return slope


def _norm(*parts: Tensor, dim: int | None = None) -> Tensor:
    """Return the root of the sum of squares, over tensors and one dimension, if there is one."""
    total = sum((part.square() for part in parts), start=torch.zeros_like(parts[0]))
    return (total if dim is None else total.sum(dim, keepdim=True)).sqrt()
