"""Difficult cases for a chunk_output kernel, drawn from its spec.

`draw` makes the tensors of a `Case`. The seed is the name of the case, so a failed case can be
drawn again anywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kgen.kernels.chunk_output.verify.problem import Problem
from kgen.kernels.chunk_output.verify.reference import Chunks, chunk_indices_of, chunks_of
from kgen.verify.deciding import edges
from kgen.verify.tensors import DTYPES, arrange


@dataclass(frozen=True)
class Case:
    """One call of the kernel.

    `lengths` are the lengths of packed sequences. A spec without `cu_seqlens` uses their sum, in
    `batch` rows. `layout` is one of `LAYOUTS`, for every tensor. `do` is `contiguous`, `strided` or
    `expanded`. `gate` is the decay over a chunk, in powers of its base. `indices` also passes
    chunk_indices, in int64.
    """

    name: str
    lengths: tuple[int, ...]
    batch: int = 1
    heads: int = 1
    layout: str = "contiguous"
    do: str = "contiguous"
    magnitude: float = 1.0
    gate: float = 2.0
    scale: float | None = None
    indices: bool = False
    tail: int = 0
    """Number of tokens after the last packed sequence. They hold NaN, and their outputs are
    zero.
    """


@dataclass
class Inputs:
    """The tensors of a case: `tensors` by argument name, `do` [B, T, HV, V], and arguments without
    gradients.
    """

    case: Case
    chunks: Chunks
    tensors: dict[str, Tensor]
    do: Tensor
    keywords: dict[str, Any]


def cases(problem: Problem, quick: bool) -> tuple[Case, ...]:
    """Return the cases of a spec. `quick` cases are small enough for Triton's interpreter."""
    found: dict[str, Case] = {}
    for case in _wanted(problem, quick):
        fitted = (
            case
            if problem.varlen
            else replace(case, lengths=(sum(case.lengths),), indices=False, tail=0)
        )
        fitted = replace(fitted, batch=1) if problem.varlen else fitted
        fitted = replace(fitted, heads=problem.heads or case.heads)
        if not any(replace(fitted, name=name) == other for name, other in found.items()):
            found[fitted.name] = fitted
    return tuple(found.values())


def _wanted(problem: Problem, quick: bool) -> Iterator[Case]:
    BT = problem.chunk_size
    yield Case("one-chunk", (BT,))
    yield Case("one-token", (1,), batch=2, heads=3)
    yield Case("no-token", (0,))
    yield Case("off-chunk", (2 * BT + 3,), batch=2, indices=True)
    yield Case("short", (1, 2, 0, BT - 1, 3), do="strided", indices=True)
    yield Case("empty-at-the-ends", (0, BT + 1, 0, 0), do="expanded")
    # Tokens after the last sequence: fewer than the chunks have room for, and several times as
    # many.
    yield Case("tail", (BT + 3, 2), tail=BT - 9, do="strided", layout="guarded")
    yield Case("long-tail", (5,), tail=2 * BT + 7, indices=True)
    yield Case("tail-alone", (0, 0), tail=3)
    yield Case("steep", (BT + 5,), gate=300.0)
    yield Case("guarded", (BT - 7, BT + 9), heads=2, layout="guarded", do="strided")
    yield Case("padded", (BT + 2,), layout="padded", scale=-0.37)
    yield Case("stepped", (19, 5), layout="stepped", magnitude=4.0)
    yield Case("very-steep", (BT - 1, BT), gate=2e4)
    if compared := edges([problem.decay] if problem.decay is not None else [], "h"):
        yield Case("heads", (9,), heads=-(-(compared[-1] + 1) // (problem.group or 2)))
    if quick:
        return
    yield Case("chunks", (8 * BT,), batch=3, heads=2)
    yield Case("flat", (3 * BT + 1,), heads=4, gate=0.0)
    yield Case("ragged", tuple(range(1, 24 * 17, 17)), heads=2, indices=True)
    yield Case("many-short", (3, 0, 1, 7, 2, 0, 5) * 40, heads=2)
    yield Case("long", (2048, 1999), batch=2, heads=2, scale=1.0)
    # Gradients grow with the cube of the magnitude: at 16 they overflow fp16.
    yield Case("large", (777, 1), heads=2, magnitude=16.0 if problem.dtype == "bf16" else 6.0)
    yield Case("long-guarded", (513, 300), batch=2, heads=3, layout="guarded", do="expanded")
    yield Case("offset", (400,), layout="offset", do="strided")
    yield Case("crowded-tail", (300, 1, 40), heads=2, tail=5000)


def draw(problem: Problem, case: Case, device: str) -> Inputs:
    """Return the tensors of a case, with the same values on every device."""
    random = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    dtype, gate = DTYPES[problem.dtype], DTYPES[problem.gate_dtype]
    B, T, BT = case.batch, sum(case.lengths) + case.tail, problem.chunk_size
    H, HV = case.heads, problem.heads_v or case.heads * (problem.group or 2)
    K, V = problem.head_qk, problem.head_v
    chunks = chunks_of(case.lengths, BT, B)
    NT = len(chunk_indices_of(case.lengths, BT))

    def normal(*shape: int, kind: Any = dtype) -> Tensor:
        return (torch.randn(shape, generator=random) * case.magnitude).to(kind)

    found = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, HV, V)}
    state = (K, V) if problem.state_layout == "kv" else (V, K)
    found["h"] = normal(B, NT, HV, *state, kind=DTYPES[problem.state_dtype])
    # Gates decay from the start of each chunk, in steps of different size.
    steps = torch.rand(B * NT, BT, HV, generator=random) * (2 * case.gate / BT)
    falls = torch.zeros(B, T, HV)
    rows = chunks.batch[:, None].expand_as(chunks.rows)[chunks.live], chunks.rows[chunks.live]
    falls[rows] = -steps.cumsum(1)[chunks.live]
    gates = {
        "g": falls.to(gate),
        "g_gamma": -(torch.rand(HV, generator=random) * (2 * case.gate / BT)).to(gate),
    }
    found |= {name: gates[name] for name in problem.gates}
    if problem.padded:
        values = torch.full((B * NT, BT, HV, V), torch.nan, dtype=dtype)
        values[chunks.live] = found["v"][rows]
        found["v"] = values.reshape(B, NT * BT, HV, V)
    keywords: dict[str, Any] = {} if case.scale is None else {"scale": case.scale}
    if problem.varlen:
        ends = torch.tensor([0, *case.lengths]).cumsum(0)
        keywords["cu_seqlens"] = ends.to(torch.int64 if case.indices else torch.int32).to(device)
        if case.indices:
            table = torch.tensor(chunk_indices_of(case.lengths, BT), dtype=torch.int64).reshape(
                -1, 2
            )
            keywords["chunk_indices"] = table.to(device)
    do = normal(B, T, HV, V)
    of_tokens = ["q", "k", *(n for n in problem.gates if n == "g")]
    if not problem.padded:
        of_tokens.append("v")
    for tensor in (do, *(found[name] for name in of_tokens)):
        tensor[:, T - case.tail :] = torch.nan
    do = do[:1, :1, :1, :1].expand_as(do) if case.do == "expanded" and T else do
    return Inputs(
        case=case,
        chunks=chunks_of(case.lengths, BT, B, device),
        tensors={
            n: arrange(t.to(device), case.layout, i) for i, (n, t) in enumerate(found.items())
        },
        do=arrange(do.to(device), "guarded" if case.do == "strided" else case.do, len(found)),
        keywords=keywords,
    )


def sized(problem: Problem, name: str, length: int, device: str) -> Inputs:
    """Return inputs of `length` tokens, in two sequences if they are packed.

    The name is the seed.
    """
    lengths = (length // 3, length - length // 3) if problem.varlen else (length,)
    return draw(problem, Case(name, lengths, heads=problem.heads or 1, indices=True), device)


def call(function: Any, inputs: Inputs, **more: Any) -> Tensor:
    """Call the emitted function on inputs as a user does."""
    return function(**inputs.tensors, **inputs.keywords, **more)


def differentiable(problem: Problem, inputs: Inputs) -> dict[str, Tensor]:
    """Return the inputs that need gradients by name, with `requires_grad` set: all except
    g_gamma.
    """
    return {n: t.requires_grad_() for n, t in inputs.tensors.items() if n != "g_gamma"}
