"""Packed sequences as peers compute them: one long sequence of documents.

The expressions of a spec use positions inside a sequence. Over the flattened tokens they read these
positions from buffers. The mask also requires the same sequence on both sides, as a FlexAttention
user would write it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle

import torch
from torch import Tensor

from kgen.expr.nodes import Call, Node, Read, Type, Var, substitute
from kgen.kernels.attention.verify.problem import Buffer, Problem

Q_IDX, KV_IDX = Var("q_idx", Type.INT), Var("kv_idx", Type.INT)


@dataclass(frozen=True)
class Packing:
    """The packing of a workload: `cu_seqlens` [N + 1] int32, and the longest length."""

    problem: Problem
    """The problem before it was flattened."""
    cu_seqlens: Tensor
    longest: int

    @property
    def arguments(self) -> tuple[Tensor, Tensor]:
        """`cu_seqlens_q` and `cu_seqlens_k` of the emitted function."""
        return self.cu_seqlens, self.cu_seqlens


def ragged(tokens: int) -> list[int]:
    """Return lengths of sequences with the sum `tokens`, from 256 to 1792 each if there are enough
    tokens."""
    mean = min(1024, max(1, tokens // 4))
    lengths: list[int] = []
    for quarters in cycle((4, 1, 7, 2, 6)):
        lengths.append(min(max(1, mean * quarters // 4), tokens - sum(lengths)))
        if sum(lengths) == tokens:
            return lengths
    raise AssertionError


def flattened(problem: Problem) -> Problem:
    """Return a problem over [1, H, T, D] that is equivalent to `problem` for each of its sequences.

    Its buffers `_sequence_q`, `_sequence_k`, `_position_q`, `_position_k` and `_length` have one
    element per token. No spec can use these names.
    """

    def read(name: str, index: Node) -> Node:
        return Read(name, (index,), Type.INT)

    here: dict[Node, Node] = {
        Q_IDX: read("_position_q", Q_IDX),
        KV_IDX: read("_position_k", KV_IDX),
        Var("b", Type.INT): read("_sequence_q", Q_IDX),
        Var("SQ", Type.INT): read("_length", Q_IDX),
        Var("SK", Type.INT): read("_length", Q_IDX),
    }
    score_mod, mask_mod = (
        None if t is None else substitute(t, here) for t in (problem.score_mod, problem.mask_mod)
    )
    same: Node = Call("eq", (read("_sequence_q", Q_IDX), read("_sequence_k", KV_IDX)), Type.BOOL)
    tokens = [
        Buffer(name, (dimension,), "int32", grad=False, sorted=False)
        for name, dimension in (
            *(
                ("_sequence_q", "SQ"),
                ("_sequence_k", "SK"),
                ("_position_q", "SQ"),
                ("_position_k", "SK"),
            ),
            ("_length", "SQ"),
        )
    ]
    return replace(
        problem,
        varlen=False,
        buffers=(*problem.buffers, *tokens),
        score_mod=score_mod,
        mask_mod=same if mask_mod is None else Call("and", (same, mask_mod), Type.BOOL),
    )


def token_buffers(lengths: list[int], device: str) -> dict[str, Tensor]:
    """Return the contents of the buffers of `flattened`."""
    sizes = torch.tensor(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
    position = torch.arange(len(sequence)) - (sizes.cumsum(0) - sizes)[sequence]
    found = {
        "_sequence_q": sequence,
        "_sequence_k": sequence,
        "_position_q": position,
        "_position_k": position,
        "_length": sizes[sequence],
    }
    return {name: values.to(torch.int32).to(device) for name, values in found.items()}


def packing(problem: Problem, lengths: list[int], device: str) -> Packing:
    """Return the packing of sequences with these lengths."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return Packing(problem, ends.to(torch.int32).to(device), max(lengths))
