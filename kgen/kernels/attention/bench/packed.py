"""Packed sequences as their peers see them: one long sequence of documents, in which every token knows its own.

A spec's modifications speak of positions inside a sequence. Over the flattened tokens the same positions are read from
buffers, and the mask also asks for the same sequence on both sides, as a user of FlexAttention would write it.
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
    """How the tokens of a workload are shared out: `cu_seqlens` [N + 1] int32, and the length of the longest."""

    problem: Problem
    """The problem in the words of the spec."""
    cu_seqlens: Tensor
    longest: int

    @property
    def arguments(self) -> tuple[Tensor, Tensor]:
        """Those of the emitted function: queries and keys are packed alike."""
        return self.cu_seqlens, self.cu_seqlens


def ragged(tokens: int) -> list[int]:
    """Lengths of sequences that add up to `tokens`: from a quarter to seven quarters of 1024, less if there are few."""
    mean = min(1024, max(1, tokens // 4))
    lengths: list[int] = []
    for quarters in cycle((4, 1, 7, 2, 6)):
        lengths.append(min(max(1, mean * quarters // 4), tokens - sum(lengths)))
        if sum(lengths) == tokens:
            return lengths
    raise AssertionError


def flattened(problem: Problem) -> Problem:
    """A problem over [1, H, T, D] that computes what `problem` computes for each of its sequences.

    Its buffers `_sequence_q`, `_sequence_k`, `_position_q`, `_position_k` and `_length`, names that no spec can have,
    have an element for each token.
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
            *(("_sequence_q", "SQ"), ("_sequence_k", "SK"), ("_position_q", "SQ"), ("_position_k", "SK")),
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
    """What the buffers of `flattened` hold."""
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
    """The packing of sequences of these lengths, one after the other."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return Packing(problem, ends.to(torch.int32).to(device), max(lengths))
