"""Rewriting over a distance keeps the value at every pair of positions, and leaves other
expressions alone.
"""

from __future__ import annotations

import pytest
import torch
from support.specs.trees import POSITIVE, draw_env, evaluate, grid, index, mask, score

from kgen.expr.algebra import Algebra
from kgen.expr.distance import DISTANCE, over_distance, reads_over_distance
from kgen.expr.nodes import reads, variables

ALGEBRA = Algebra(POSITIVE)
POINTS = grid(9, 7) | draw_env(3, 9, 7) | {"b": 1, "h": 0, "score": 0.5}
ALONG = POINTS | {DISTANCE.name: POINTS["q_idx"] - POINTS["kv_idx"]}


@pytest.mark.parametrize(
    "text",
    [
        "q_idx - kv_idx",
        "min(abs(q_idx - kv_idx), 4)",
        "(kv_idx + offset - q_idx) // 2 % 3",
        "2 * q_idx - h - 2 * kv_idx",
        "clamp(q_idx + lens[b] - SQ - kv_idx, 0, 3)",
        "where(q_idx > kv_idx, 1, q_idx - kv_idx + 2)",
        "h",
    ],
)
def test_indices_by_distance(text: str) -> None:
    found = over_distance(index(text), ALGEBRA)
    assert found is not None
    assert not variables(found) & {"q_idx", "kv_idx"}
    assert torch.equal(
        *torch.broadcast_tensors(evaluate(found, ALONG), evaluate(index(text), POINTS))
    )


@pytest.mark.parametrize(
    "text",
    [
        "q_idx",
        "q_idx + kv_idx",
        "q_idx // 2 - kv_idx // 2",
        "doc[q_idx] - kv_idx",
        "2 * q_idx - kv_idx",
    ],
)
def test_other_indices(text: str) -> None:
    assert over_distance(index(text), ALGEBRA) is None


@pytest.mark.parametrize(
    "text", ["q_idx >= kv_idx", "q_idx < kv_idx + window", "(q_idx - kv_idx) % dilation == 0"]
)
def test_conditions_by_distance(text: str) -> None:
    found = over_distance(mask(text), ALGEBRA)
    assert found is not None
    assert torch.equal(evaluate(found, ALONG), evaluate(mask(text), POINTS))


def test_only_reads_are_rewritten() -> None:
    tree = score(
        "where(q_idx > kv_idx, score, 0.5) + table[h, abs(kv_idx - q_idx) % 5] * rows[q_idx]"
    )
    found = reads_over_distance(tree, ALGEBRA)
    assert [variables(read) for read in reads(found)] == [{"h", "distance"}, {"q_idx"}]
    assert {"q_idx", "kv_idx"} <= variables(found)
    assert torch.equal(evaluate(found, ALONG), evaluate(tree, POINTS))
