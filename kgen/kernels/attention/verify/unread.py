"""Buffer elements that no visible pair reads. Their values must not change results or gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kgen.expr.nodes import reads
from kgen.kernels.attention.verify.problem import Problem
from kgen.verify.evaluate import evaluate

Lengths = list[tuple[int, int, int]]
"""For each sequence: its queries, its capacity of keys, and its keys."""
ANYTHING = (torch.nan, torch.inf, -torch.inf)


def candidates(problem: Problem) -> frozenset[str]:
    """Return the float buffers that the score reads and the mask does not."""
    if problem.score_mod is None:
        return frozenset()
    mask = problem.mask_mod
    by_mask = {read.buffer for read in reads(mask)} if mask is not None else set()
    real = {b.name for b in problem.buffers if b.dtype in ("fp32", "bf16", "fp16", "any")}
    return frozenset({read.buffer for read in reads(problem.score_mod)} & real - by_mask)


def with_anything(
    problem: Problem, buffers: Mapping[str, Tensor], scalars: Mapping[str, Any], lengths: Lengths
) -> dict[str, Tensor]:
    """Return the buffers with NaN and infinities in elements that no visible pair reads."""
    seen = {
        name: torch.zeros(buffers[name].shape, dtype=torch.bool) for name in candidates(problem)
    }
    for env in _visible_pairs(problem, {**buffers, **scalars}, lengths):
        for read in reads(problem.score_mod) if problem.score_mod is not None else ():
            if read.buffer in seen and not read.indices:
                seen[read.buffer] |= env["q_idx"].numel() > 0
            elif read.buffer in seen:
                at = torch.broadcast_tensors(
                    env["q_idx"], *(evaluate(i, env, torch) for i in read.indices)
                )[1:]
                shape = seen[read.buffer].shape
                inside = torch.stack(
                    [(i >= 0) & (i < n) for i, n in zip(at, shape, strict=True)]
                ).all(0)
                seen[read.buffer][tuple(i[inside] for i in at)] = True
    return {**buffers, **{name: _anything(buffers[name], of) for name, of in seen.items()}}


def _visible_pairs(
    problem: Problem, env: dict[str, Any], lengths: Lengths
) -> Iterator[dict[str, Any]]:
    """Yield the positions of the visible pairs for each sequence and head."""
    for b, (sq, sk, keys) in enumerate(lengths):
        first = keys - sq if problem.aligned_to_end else 0
        for h in range(env["HQ"]):
            at = env | {"b": b, "h": h, "SQ": sq, "SK": sk, "inf": torch.inf}
            at |= {
                "q_idx": first + torch.arange(sq)[:, None],
                "kv_idx": torch.arange(keys)[None, :],
            }
            mask = torch.ones(sq, keys, dtype=torch.bool)
            if problem.mask_mod is not None:
                mask &= evaluate(problem.mask_mod, at, torch)
            row, column = mask.nonzero(as_tuple=True)
            yield at | {"q_idx": first + row, "kv_idx": column}


def _anything(values: Tensor, seen: Tensor) -> Tensor:
    kinds = torch.tensor(ANYTHING, dtype=values.dtype)[torch.arange(values.numel()) % len(ANYTHING)]
    return torch.where(seen, values, kinds.view(values.shape))
