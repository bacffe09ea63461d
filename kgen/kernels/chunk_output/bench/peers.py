"""The peers of a chunk_output kernel: flash-linear-attention and eager PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kgen.bench.peers import FLA, DoesNotApply
from kgen.expr.unparse import show
from kgen.kernels.chunk_output.verify.problem import Problem
from kgen.kernels.chunk_output.verify.reference import (
    Call,
    Chunks,
    chunk_indices_of,
    chunk_output,
    chunks_of,
)
from kgen.verify.tensors import DTYPES

LOG2E = math.log2(math.e)
FLA_DECAYS = ("", "g[i]", "(i + 1) * g_gamma[h]")
"""The decays that flash-linear-attention supports."""


@dataclass(frozen=True)
class Workload:
    """Tensors by argument name, do [B, T, HV, V], and the lengths of the packed sequences."""

    problem: Problem
    tensors: Mapping[str, Tensor]
    do: Tensor
    lengths: Sequence[int]
    keywords: Mapping[str, Any]

    @property
    def chunks(self) -> Chunks:
        """The tokens of each chunk."""
        return chunks_of(self.lengths, self.problem.chunk_size, self.do.shape[0], self.do.device)

    @property
    def learned(self) -> tuple[str, ...]:
        """The inputs with gradients.

        States come last, since not every peer computes their gradient.
        """
        return tuple(n for n in ("q", "k", "v", "g", "h") if n in self.tensors)


def draw_workload(problem: Problem, shape: Any, tokens: int, pieces: int, device: str) -> Workload:
    """Create N(0, 1) operands, gates that decrease by about one per chunk, and `pieces` ragged
    sequences."""
    torch.manual_seed(0)
    BT, K, V = problem.chunk_size, problem.head_qk, problem.head_v
    H = problem.heads or shape.heads
    HV = problem.heads_v or (H * problem.group if problem.group else shape.heads_v)
    B = 1 if problem.varlen else shape.batch
    weights = torch.rand(pieces) + 0.1
    ends = (weights.cumsum(0) / weights.sum() * tokens).round().long()
    lengths = ends.diff(prepend=ends.new_zeros(1)).tolist()
    NT = len(chunk_indices_of(lengths, BT))
    dtype, gate = DTYPES[problem.dtype], DTYPES[problem.gate_dtype]

    def normal(*size: int, kind: Any = dtype) -> Tensor:
        return torch.randn(size, device=device).to(kind)

    state = (K, V) if problem.state_layout == "kv" else (V, K)
    tensors = {"q": normal(B, tokens, H, K), "k": normal(B, tokens, H, K)}
    tensors["v"] = normal(B, NT * BT if problem.padded else tokens, HV, V)
    tensors["h"] = normal(B, NT, HV, *state, kind=DTYPES[problem.state_dtype])
    gates = {
        "g": -torch.rand(B, tokens, HV, device=device).to(gate),
        "g_gamma": -torch.rand(HV, device=device).to(gate) / BT,
    }
    tensors |= {name: gates[name] for name in problem.gates}
    keywords: dict[str, Any] = {}
    if problem.varlen:
        table = chunk_indices_of(lengths, BT)
        keywords["cu_seqlens"] = torch.tensor([0, *ends.tolist()], dtype=torch.int32, device=device)
        keywords["chunk_indices"] = torch.tensor(table, dtype=torch.int32, device=device)
    return Workload(problem, tensors, normal(B, tokens, HV, V), lengths, keywords)


def nbytes(workload: Workload, backward: bool) -> int:
    """Return the bytes of all inputs and outputs, each counted once."""
    tensors, do = workload.tensors, workload.do
    inputs = sum(t.numel() * t.element_size() for t in tensors.values())
    gradients = sum(tensors[n].numel() * tensors[n].element_size() for n in workload.learned)
    return int(inputs + do.numel() * do.element_size() + (gradients if backward else 0))


def prepare(
    peer: str, workload: Workload, functions: Mapping[str, Any], backward: bool
) -> Callable[[], Any]:
    """Return a function to time. It returns [o], or the gradients of `learned` in order, perhaps
    without the last.

    Raise `DoesNotApply` if the peer cannot compute the spec.
    """
    if peer in functions:
        return _emitted(functions[peer], workload, backward)
    return {"fla": _fla, "eager": _eager}[peer](workload, backward)


def _emitted(function: Any, workload: Workload, backward: bool) -> Callable[[], Any]:
    tensors = {
        n: t.detach().requires_grad_(backward and n in workload.learned)
        for n, t in workload.tensors.items()
    }
    if not backward:
        return lambda: [function(**tensors, **workload.keywords)]
    o = function(**tensors, **workload.keywords)
    wanted = [tensors[n] for n in workload.learned]
    return lambda: torch.autograd.grad(o, wanted, workload.do, retain_graph=True)


def _eager(workload: Workload, backward: bool) -> Callable[[], Any]:
    problem, chunks = workload.problem, workload.chunks

    def run() -> list[Tensor]:
        result = chunk_output(
            workload.tensors,
            chunks,
            Call(
                decay=problem.decay,
                gate_base=problem.gate_base,
                state_layout=problem.state_layout,
                padded=problem.padded,
                do=workload.do if backward else None,
                wanted=workload.learned if backward else (),
            ),
            exact=False,
        )
        return list(result.grads.values()) if backward else [result.o]

    return run


def _fla(workload: Workload, backward: bool) -> Callable[[], Any]:
    """Return fla's kernels on the same numbers: values by token, exponents in base 2, no incoming
    gradient of the states."""
    problem, t = workload.problem, workload.tensors
    if (show(problem.decay) if problem.decay else "") not in FLA_DECAYS or (
        problem.padded and backward
    ):
        raise DoesNotApply  # the gradient of padded values has another layout in fla
    chunk_o = FLA.load("common.chunk_o")
    # On compute capability 9.0, fla refuses backward with a gate under some versions of Triton that
    # gave wrong results. The race compares results, so the check is not needed.
    chunk_o.IS_NVIDIA_HOPPER = False
    natural = problem.gate_base == "e"
    v = _by_token(workload) if problem.padded else t["v"]
    options: dict[str, Any] = {n: t[n] * (LOG2E if natural else 1.0) for n in problem.gates}
    options |= {"scale": problem.head_qk**-0.5, "chunk_size": problem.chunk_size}
    options |= {"state_v_first": problem.state_layout == "vk"}
    options |= {name: table.long() for name, table in workload.keywords.items()}
    if not backward:
        return lambda: [chunk_o.chunk_fwd_o(t["q"], t["k"], v, t["h"], **options)]
    dh, do = torch.zeros_like(t["h"]), workload.do

    def run() -> list[Tensor]:
        dq, dk, _, dg = chunk_o.chunk_bwd_dqkwg(t["q"], t["k"], t["v"], do, t["h"], dh, **options)
        dv = chunk_o.chunk_bwd_dv(t["q"], t["k"], do, dh, **options)
        # fla returns dg for base e, for every base.
        return [
            dq,
            dk,
            dv,
            *([dg * (1.0 if natural else math.log(2))] if "g" in problem.gates else []),
        ]

    return run


def _by_token(workload: Workload) -> Tensor:
    """Return v as [B, T, HV, V] from its chunks."""
    chunks, v = workload.chunks, workload.tensors["v"]
    out = v.new_empty(workload.do.shape)
    rows = chunks.batch[:, None].expand_as(chunks.rows)[chunks.live], chunks.rows[chunks.live]
    return out.index_put_(rows, v.reshape(*chunks.rows.shape, *v.shape[2:])[chunks.live])
