"""Operands, buffers and parameters of an attention benchmark."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kgen.expr.nodes import variables
from kgen.kernels.attention.bench.packed import Packing, flattened, packing, ragged, token_buffers
from kgen.kernels.attention.spec import ANY
from kgen.kernels.attention.verify.problem import Buffer, Problem
from kgen.verify.evaluate import evaluate
from kgen.verify.tensors import DTYPES


@dataclass(frozen=True)
class Workload:
    """A workload: q [B, HQ, SQ, D], k [B, HKV, SK, D], v [B, HKV, SK, DV], dout [B, HQ, SQ, DV]."""

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    buffers: Mapping[str, Tensor]
    params: Mapping[str, int | float]
    packing: Packing | None = None
    """The packing of packed sequences. They are one sequence of documents with B = 1."""

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that expressions can name."""
        return {
            "B": self.q.shape[0],
            "HQ": self.q.shape[1],
            "HKV": self.k.shape[1],
            "SQ": self.q.shape[2],
            "SK": self.k.shape[2],
        }

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return int(self.q.shape[1]) // int(self.k.shape[1])

    @property
    def first(self) -> int:
        """The position of the first query."""
        return int(self.k.shape[2] - self.q.shape[2]) if self.problem.aligned_to_end else 0

    @property
    def runtime(self) -> dict[str, int | float]:
        """The run-time parameters of the emitted function."""
        return {p.name: self.params[p.name] for p in self.problem.runtime_params}


def draw_workload(
    problem: Problem,
    batch: int,
    heads: int,
    length: int,
    device: str,
    queries: int | None = None,
    kv_heads: int | None = None,
    documents: int | None = None,
) -> Workload:
    """Create a workload: N(0, 1) operands, documents of 1024 tokens, slopes like ALiBi's.

    There are `length` keys and `queries` queries (default: `length`). Packed sequences have
    `batch * length` tokens in total, in `documents` sequences (default: one per 1024 tokens).
    Specs with `gqa: any` have `kv_heads` (default: `heads`).
    """
    torch.manual_seed(0)
    lengths = _lengths(batch * length, documents) if problem.varlen else []
    packed = None
    if problem.varlen:
        batch, length = 1, batch * length
        packed, problem = packing(problem, lengths, device), flattened(problem)
    group = heads // (kv_heads or heads) if problem.gqa == "any" else int(problem.gqa)
    heads_kv = max(1, heads // group)
    heads = heads_kv * group
    step = math.lcm(problem.q_multiple, problem.kv_multiple)
    length = -(-length // step) * step
    dtype = DTYPES[problem.dtype]

    def normal(b: int, h: int, s: int, d: int) -> Tensor:
        if packed is not None:
            return torch.randn((b, s, h, d), device=device).to(dtype).transpose(1, 2)
        return torch.randn((b, h, s, d), device=device).to(dtype)

    queries = length if queries is None else queries
    sizes = {"B": len(lengths) or batch, "HQ": heads, "HKV": heads_kv, "SQ": queries, "SK": length}
    tokens = token_buffers(lengths, device) if packed else {}
    runtime = {p.name: _ordinary(p.name, p.type, length) for p in problem.runtime_params}
    return Workload(
        problem=problem,
        q=normal(batch, heads, queries, problem.head_qk),
        k=normal(batch, heads_kv, length, problem.head_qk),
        v=normal(batch, heads_kv, length, problem.head_v),
        dout=normal(batch, heads, queries, problem.head_v),
        buffers={
            b.name: _contents(b, sizes, problem.block_mask).to(device)
            for b in problem.buffers
            if b.name not in tokens
        }
        | tokens,
        params={p.name: p.value for p in problem.params if p.value is not None} | runtime,
        packing=packed,
    )


def _lengths(tokens: int, documents: int | None) -> list[int]:
    """Return the lengths of packed sequences, all at least 1."""
    if documents is None:
        return ragged(tokens)
    # Each token falls into a random sequence.
    drawn = torch.randint(documents, (tokens - documents,)).bincount(minlength=documents) + 1
    return [int(n) for n in drawn]


def _ordinary(name: str, type_: str, length: int) -> int | float:
    if type_ == "int":
        return min(1024, length // 4)
    return 30.0 if "cap" in name else 1.0


def _contents(buffer: Buffer, sizes: Mapping[str, int], in_blocks: bool = False) -> Tensor:
    """Return contents for a buffer. With `in_blocks`, buffers of a mask exclude whole blocks."""
    dtype, length = DTYPES[buffer.dtypes[0]], sizes["SK"]
    sizes = {**sizes, ANY: length}
    shape = tuple(n if isinstance(n, int) else sizes[n] for n in buffer.shape)
    per_token = any(n in ("SQ", "SK") for n in buffer.shape)
    if dtype.is_floating_point:
        if per_token or not shape:
            values = torch.randn(shape)
        else:
            values = torch.exp2(-8 * torch.arange(1, shape[-1] + 1) / shape[-1]).expand(shape)
        return (values.sort(-1).values if buffer.sorted else values).to(dtype).contiguous()
    if dtype == torch.bool:
        return torch.rand(shape) > (0.75 if in_blocks else 0.1)
    if per_token and buffer.sorted:
        document = min(1024, max(1, length // 4))
        return (torch.arange(shape[-1]) // document).expand(shape).to(dtype).contiguous()
    if per_token and in_blocks:
        # Runs of 256 equal numbers, each followed by 768 zeros.
        place = torch.arange(shape[-1])
        return (
            torch.where(place % 1024 < 256, place // 1024 + 1, 0)
            .expand(shape)
            .to(dtype)
            .contiguous()
        )
    if per_token:
        return torch.randint(0, 4, shape).to(dtype)
    if buffer.sorted:
        return torch.linspace(0, length, shape[-1]).expand(shape).to(dtype).contiguous()
    return torch.full(shape, 3 * length // 4 if "len" in buffer.name else length // 4).to(dtype)


def visible(workload: Workload) -> int:
    """Count the (b, h, query, key) that the mask allows, exactly."""
    size, mask_mod = workload.sizes, workload.problem.mask_mod
    every = size["B"] * size["HQ"] * size["SQ"] * size["SK"]
    if mask_mod is None:
        return every
    device, used = workload.q.device, variables(mask_mod)
    batches, heads = (size["B"] if "b" in used else 1), (size["HQ"] if "h" in used else 1)
    env: dict[str, Any] = {**size, **workload.params, **workload.buffers, "inf": torch.inf}
    env["kv_idx"] = torch.arange(size["SK"], device=device)[None, :]
    count = 0
    for b in range(batches):
        for h in range(heads):
            for start in range(0, size["SQ"], 1024):
                rows = torch.arange(start, min(start + 1024, size["SQ"]), device=device)[:, None]
                mask = evaluate(
                    mask_mod, env | {"b": b, "h": h, "q_idx": workload.first + rows}, torch
                )
                count += int(mask.expand(len(rows), size["SK"]).sum())
    return count * (size["B"] // batches) * (size["HQ"] // heads)
