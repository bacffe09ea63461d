"""Difficult cases for a linear_attention kernel, drawn from its spec.

`draw` makes the tensors of a `Case`. The seed is the name of the case, so a failed case can be
drawn again anywhere.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from kgen.expr.nodes import Type, Var, reads, substitute
from kgen.kernels.linear_attention.verify.problem import Buffer, Problem
from kgen.kernels.linear_attention.verify.reference import STATE, Call
from kgen.verify.evaluate import evaluate
from kgen.verify.tensors import DTYPES, arrange

OF_OUTPUT = ("output_gate", "output")
"""The fields of the expressions after the recurrence."""
OUTPUTS = ("o", "final_state")
"""Outputs with cotangents."""
ASKED = {"final_state": "output_final_state", "states": "return_states"}
"""The keyword that requests an output, for those that need one."""


States = Literal["none", "in", "out", "both"]
"""The states of a call: an initial state as an argument, a final state as an output, or both."""


@dataclass(frozen=True)
class Case:
    """One call of the kernel.

    `lengths` are the lengths of packed sequences. A spec without `cu_seqlens` uses their sum, in
    `batch` rows. `layout` is one of `LAYOUTS`, for every tensor. `do` is `contiguous`, `strided` or
    `expanded`.
    """

    name: str
    lengths: tuple[int, ...]
    batch: int = 1
    heads: int = 1
    layout: str = "contiguous"
    do: str = "contiguous"
    magnitude: float = 1.0
    gates: Literal["usual", "steep", "none", "hard"] = "usual"
    """Buffers with tokens. `usual`: the state lasts for about a chunk. `steep`: for a few tokens.
    `none`: those of the decay are zero. `hard`: at random zero, or a number that saturates the
    gate.
    """
    keys: Literal["random", "repeated", "few"] = "random"
    """`repeated`: one key for all tokens. `few`: four keys in turn, two of them opposite."""
    values: Literal["random", "zeros", "small"] = "random"
    """`zeros`: v is zero in the first half of the tokens. `small`: v and states
    have the size of the root of `output_eps`.
    """
    scale: float | None = None
    states: States = "both"
    """The initial state is an argument; the final state is an output, with a cotangent."""
    within: str | None = None
    """Dtype of the states within sequences, an output. In forward, it is the dtype of states."""
    long_offsets: bool = False
    """`cu_seqlens` is int64."""
    tail: int = 0
    """Number of tokens after the last packed sequence. They hold NaN, and their outputs are
    zero.
    """


FAR = 1e4
"""The largest number in a buffer: a decay of b**-FAR is zero in every precision."""
SATURATED = 20.0
"""A number at which a sigmoid is 1 in float32, in buffers that only the output reads."""


@dataclass
class Inputs:
    """The tensors of a case: `tensors` by argument name, `cotangents` of the outputs, and arguments
    without gradients.
    """

    case: Case
    tensors: dict[str, Tensor]
    cotangents: dict[str, Tensor]
    keywords: dict[str, Any]

    def call(
        self, problem: Problem, wanted: tuple[str, ...] = (), every: int | None = None
    ) -> Call:
        """Return the options with which references compute this call."""
        lengths = self.case.lengths if problem.varlen else None
        return Call(lengths, self.case.scale, self.cotangents if wanted else {}, wanted, every)


def cases(problem: Problem, quick: bool) -> tuple[Case, ...]:
    """Return the cases of a spec. `quick` cases are small enough for Triton's interpreter."""
    return fitted(problem, _wanted(problem, quick))


def decode_cases(problem: Problem, quick: bool) -> tuple[Case, ...]:
    """Return the cases of the function that steps a state. It has no initial and final state."""
    return fitted(problem, _steps(problem, quick))


def fitted(problem: Problem, wanted: Iterator[Case]) -> tuple[Case, ...]:
    """Return each distinct case, with the sizes that the spec allows."""
    found: dict[str, Case] = {}
    for case in wanted:
        if problem.varlen:
            own = replace(case, batch=1)
        else:
            own = replace(case, lengths=(sum(case.lengths),), long_offsets=False, tail=0)
        own = replace(own, heads=problem.heads or case.heads)
        if not any(replace(own, name=name) == other for name, other in found.items()):
            found[own.name] = own
    return tuple(found.values())


def _wanted(problem: Problem, quick: bool) -> Iterator[Case]:
    C = problem.chunk_size
    yield Case("one-chunk", (C,), states="none")
    yield Case("one-token", (1,), batch=2, heads=2)
    yield Case("no-token", (0,))
    yield Case("off-chunk", (C + 3,), batch=2, states="in", do="strided")
    yield Case("short", (1, 2, 0, C - 1, 3), states="out", long_offsets=True)
    yield Case("empty-at-the-ends", (0, C + 1, 0, 0), do="expanded")
    # Tokens after the last sequence: fewer than a chunk has room for, and more than a chunk.
    yield Case("tail", (C + 3, 2), tail=C - 9, do="strided", layout="guarded")
    yield Case("tail-alone", (0, 0), tail=3)
    yield Case("kept-states", (C + 3, 0, 2 * C, 1), batch=2, tail=C, within=problem.state_dtype)
    yield Case("hard-gates", (C + 5,), gates="hard")
    yield Case("steep-gates", (C - 3, 4), gates="steep")
    yield Case("no-gates", (C + 2,), gates="none", states="out")
    yield Case("repeated-keys", (C + 7,), keys="repeated", states="out")
    yield Case("few-keys", (C - 1,), keys="few", gates="none")
    yield Case("guarded", (C - 7, 9), layout="guarded", do="strided")
    yield Case("padded", (C // 2 + 2,), layout="padded", scale=-0.37)
    yield Case("stepped", (19, 5), layout="stepped", states="in")
    if problem.finishes:
        # Rows of zeros, and rows whose mean square is about the number under the root.
        yield Case("zero-rows", (C + 3, C - 1), values="zeros", states="none")
        yield Case("small-rows", (C + 1, 2), values="small", states="none")
    if quick:
        return
    yield Case("chunks", (5 * C,), batch=2, heads=2)
    yield Case("ragged", tuple(range(1, 9 * 17, 17)), heads=2, long_offsets=True)
    yield Case("many-short", (3, 0, 1, 7, 2, 0, 5) * 12, heads=2)
    yield Case("long", (517, 500), heads=2, scale=1.0)
    yield Case("long-kept", (400, 0, 333, 7), heads=2, tail=100, within=problem.state_dtype)
    large = 8.0 if problem.dtype == "bf16" else 2.0
    yield Case("large", (4 * C + 1, 1), heads=2, magnitude=large, states="in")
    yield Case("long-steep", (3 * C, C), heads=2, gates="steep")
    yield Case("long-guarded", (193, 100), batch=2, heads=3, layout="guarded", do="expanded")
    yield Case("long-hard", (6 * C,), heads=2, gates="hard", keys="few")
    yield Case("long-repeated", (6 * C,), heads=2, gates="none", keys="repeated")
    yield Case("offset", (3 * C,), layout="offset", do="strided")
    yield Case("crowded-tail", (100, 1, 40), heads=2, tail=1000)


def _steps(problem: Problem, quick: bool) -> Iterator[Case]:
    yield Case("one-step", (1,), batch=2)
    yield Case("few-steps", (4,), heads=2, layout="guarded")
    yield Case("uneven-steps", (1, 0, 3), long_offsets=True)
    yield Case("kept-steps", (1, 0, 3), batch=2, layout="padded", within="fp32")
    yield Case("rounded-steps", (2, 1), heads=2, layout="guarded", within="bf16")
    yield Case("hard-steps", (5,), gates="hard", keys="few", scale=0.5)
    yield Case("no-step", (0,))
    if problem.finishes:
        yield Case("small-steps", (3,), values="small")
    if quick:
        return
    yield Case("many-states", (1,) * 9, batch=33, heads=2)
    yield Case("padded-steps", (7,), layout="padded", batch=3)
    yield Case("stepped-steps", (2,), layout="stepped", batch=2)


# --- tensors ------------------------


def draw(problem: Problem, case: Case, device: str) -> Inputs:
    """Return the tensors of a case, with the same values on every device."""
    random = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    dtype = DTYPES[problem.dtype]
    B, T = case.batch, sum(case.lengths) + case.tail
    H, HV = case.heads, problem.heads_v or case.heads * (problem.group or 2)
    K, V = problem.head_qk, problem.head_v

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    small = (problem.output_eps or 1.0) ** 0.5 if case.values == "small" else 1.0
    size = case.magnitude * small
    # Feature maps may grow fast, so only values are large for them.
    mapped = problem.q_map is not None or problem.k_map is not None
    of_keys = 1.0 if mapped else case.magnitude
    found = {
        "q": normal(B, T, H, K) * of_keys,
        "k": _keys(problem, case, normal(B, T, H, K) * of_keys),
        "v": normal(B, T, HV, V) * size,
    }
    if case.values == "zeros":
        found["v"][:, : T // 2] = 0
    found = {name: x.to(dtype) for name, x in found.items()}
    sizes = {"T": T, "HV": HV, "K": K, "V": V}
    for buffer in problem.buffers:
        shape = [sizes[size] for size in buffer.shape]
        numbers = normal(*([B] if buffer.tokens else []), *shape)
        found[buffer.name] = gates_of(problem, buffer, case, numbers).to(DTYPES[buffer.dtype])
    sequences = len(case.lengths) if problem.varlen else B
    state = normal(sequences, HV, K, V) * size
    if case.states in ("in", "both"):
        found[STATE] = state.to(DTYPES[problem.state_dtype])
    keywords: dict[str, Any] = {} if case.scale is None else {"scale": case.scale}
    if problem.varlen:
        ends = torch.tensor([0, *case.lengths]).cumsum(0)
        keywords["cu_seqlens"] = ends.to(torch.int64 if case.long_offsets else torch.int32)
    cotangents = {"o": normal(B, T, HV, V).to(dtype)}
    if case.states in ("out", "both"):
        keywords["output_final_state"] = True
        change = normal(sequences, HV, K, V)
        cotangents["final_state"] = change.to(DTYPES[problem.state_dtype])
    if case.within is not None:
        keywords["return_states"] = True
    with_tokens = ["q", "k", "v", *(b.name for b in problem.buffers if b.tokens)]
    for tensor in (cotangents["o"], *(found[name] for name in with_tokens)):
        tensor[:, T - case.tail :] = torch.nan
    return _arranged(case, found, cotangents, keywords, device)


def _arranged(
    case: Case,
    tensors: Mapping[str, Tensor],
    cotangents: Mapping[str, Tensor],
    keywords: Mapping[str, Any],
    device: str,
) -> Inputs:
    """Move the tensors to a device, in the layouts of the case."""
    moved = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in keywords.items()}
    changes = dict(cotangents)
    if case.do == "expanded" and changes["o"].numel():
        changes["o"] = changes["o"][:1, :1, :1, :1].expand_as(changes["o"])
    layout = "guarded" if case.do == "strided" else case.do
    return Inputs(
        case,
        {n: arrange(x.to(device), case.layout, i) for i, (n, x) in enumerate(tensors.items())},
        {n: arrange(x.to(device), layout, 9 + i) for i, (n, x) in enumerate(changes.items())},
        moved,
    )


def _keys(problem: Problem, case: Case, keys: Tensor) -> Tensor:
    """Return the keys of a case; for the delta rule without a norm, of at most length one."""
    if case.keys != "random" and keys.shape[1]:
        few = [0] if case.keys == "repeated" else [0, 1, 0, 2]
        signs = torch.tensor([1.0, 1.0, -1.0, 1.0])[: len(few)]
        turn = torch.arange(keys.shape[1]) % len(few)
        chosen = torch.tensor(few)[turn].clamp(max=keys.shape[1] - 1)
        keys = keys[:, chosen] * signs[turn][:, None, None]
    if not (problem.unit_keys and keys.numel()):
        return keys
    if problem.k_map is None:
        return keys / keys.norm(dim=-1, keepdim=True)
    for halvings in range(12):
        smaller = keys * 0.5**halvings
        features = evaluate(problem.k_map, {"x": smaller}, torch)
        if float(features.norm(dim=-1).max()) <= 1:
            return smaller
    raise ValueError(f"{problem.name}: keys are longer than 1 after `k_map`: use `qk_norm: l2`")


def sized(problem: Problem, name: str, length: int, device: str) -> Inputs:
    """Return inputs of `length` tokens, in two sequences if they are packed.

    The name is the seed.
    """
    lengths = (length // 3, length - length // 3) if problem.varlen else (length,)
    return draw(problem, Case(name, lengths, heads=problem.heads or 1), device)


def call(function: Any, inputs: Inputs, **more: Any) -> dict[str, Tensor]:
    """Call the emitted function on inputs as a user does, and return its outputs by name."""
    found = function(**inputs.tensors, **inputs.keywords, **more)
    outputs = found if isinstance(found, tuple) else (found,)
    asked = [name for name, keyword in ASKED.items() if (inputs.keywords | more).get(keyword)]
    return dict(zip(("o", *asked), outputs, strict=True))


def differentiable(problem: Problem, inputs: Inputs) -> dict[str, Tensor]:
    """Return the inputs that need gradients by name, with `requires_grad` set."""
    fixed = {buffer.name for buffer in problem.buffers if not buffer.grad}
    return {n: x.requires_grad_() for n, x in inputs.tensors.items() if n not in fixed}


# --- buffers ------------------------

_KINDS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "negative": lambda x: -x.abs(),
    "positive": lambda x: x.abs(),
    "share": lambda x: 0.5 * (1 + torch.erf(x * 0.5**0.5)),
}
"""Distributions of a buffer, from normal numbers. `share` is uniform between 0 and 1."""

_CHANGES = ((1.0, 0.0), (0.05, 0.0), (1.0, -4.0), (1.0, 4.0))
"""Factors and terms with which buffers are changed for a slow decay; the first changes nothing."""
CLOSE = 1.0
"""A decay is slow enough if it differs by less than this power of e from two over a chunk."""


@dataclass(frozen=True)
class Drawn:
    """The distribution of a buffer, and the change for a slow decay."""

    kind: str
    factor: float = 1.0
    term: float = 0.0

    def steep(self, normal: Tensor) -> Tensor:
        """Return numbers of the distribution."""
        return _KINDS[self.kind](normal)

    def slow(self, normal: Tensor) -> Tensor:
        """Return numbers with which the state lasts for about a chunk."""
        return self.steep(normal) * self.factor + self.term


@cache
def drawn(problem: Problem) -> Mapping[str, Drawn]:
    """Return the distribution of each buffer that decay or beta read, so that the state stays
    bounded.

    The decay must be at most 0. For the delta rule, beta must be between 0 and 2. Raises
    `ValueError` if no combination of distributions fulfills both. As few buffers as possible are
    changed for a slow decay.
    """
    gates, decays = problem.read_by("decay", "beta"), problem.read_by("decay")
    names = [buffer.name for buffer in gates]
    random = torch.Generator().manual_seed(0)
    samples = {n: torch.randn(193, generator=random, dtype=torch.float64) for n in names}

    def gated(chosen: Mapping[str, Drawn]) -> tuple[Tensor | None, Tensor | None]:
        slow = {name: one.slow(samples[name]) for name, one in chosen.items()}
        return _gate(problem, "decay", slow), _gate(problem, "beta", slow)

    for kinds in itertools.product(_KINDS, repeat=len(names)):
        chosen = {name: Drawn(kind) for name, kind in zip(names, kinds, strict=True)}
        if _bounded(problem, *gated(chosen)):
            break
    else:
        message = "the decay is above 0, or beta is outside of 0 to 2, for all drawn buffers"
        raise ValueError(f"{problem.name}: {message}")
    best, found = math.inf, chosen
    choices = itertools.product(_CHANGES, repeat=len(decays))
    for changes in sorted(choices, key=lambda one: len(one) - one.count(_CHANGES[0])):
        slower = {b.name: change for b, change in zip(decays, changes, strict=True)}
        other = {n: Drawn(one.kind, *slower.get(n, ())) for n, one in chosen.items()}
        decay, beta = gated(other)
        if best > CLOSE and _bounded(problem, decay, beta) and _distance(problem, decay) < best:
            best, found = _distance(problem, decay), other
    return found


def _bounded(problem: Problem, decay: Tensor | None, beta: Tensor | None) -> bool:
    falls = decay is None or bool((decay <= 0).all())
    return falls and (not problem.delta or beta is None or bool(((beta >= 0) & (beta <= 2)).all()))


def _distance(problem: Problem, decay: Tensor | None) -> float:
    """Return the distance of the median decay from two over a chunk, in powers of e."""
    if decay is None:
        return 0.0
    return abs(math.log(max(float(-decay.median()), 1e-30) * problem.chunk_size / 2))


def _gate(problem: Problem, name: str, values: Mapping[str, Tensor]) -> Tensor | None:
    """Return an expression at these values of buffers, for some heads and columns."""
    tree = getattr(problem, name)
    if tree is None:
        return None
    tree = substitute(tree, {r: Var(r.buffer, Type.FLOAT) for r in reads(tree)})
    heads = problem.heads_v or 8
    env = {"h": torch.arange(heads)[:, None, None], "c": torch.arange(problem.head_qk)[:, None]}
    sizes = {"H": problem.heads or heads, "HV": heads}
    found: Tensor = evaluate(tree, {**env, **sizes, **values}, torch)
    return found


def gates_of(problem: Problem, buffer: Buffer, case: Case, normal: Tensor) -> Tensor:
    """Return a buffer of the case, from normal numbers."""
    own = drawn(problem).get(buffer.name)
    if own is None:
        if case.gates == "hard" and buffer.tokens and buffer in problem.read_by(*OF_OUTPUT):
            return torch.where(normal.abs() < 0.5, 0.0, normal.sign() * SATURATED)
        return normal
    if case.gates == "none" and buffer.tokens and buffer in problem.read_by("decay"):
        return torch.zeros_like(normal)
    if not buffer.tokens or case.gates in ("usual", "none"):
        return own.slow(normal)
    if case.gates == "steep":
        return own.steep(normal)
    far = 1.0 if own.kind == "share" else FAR
    return torch.where(normal.abs() < 0.5, 0.0, own.steep(normal).sign() * far)
