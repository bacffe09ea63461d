"""Operations of trees, by kind."""

from __future__ import annotations

import pytest

from kgen.expr.nodes import Type
from kgen.expr.operations import operations
from kgen.expr.parse import parse_expression
from kgen.expr.scope import BufferType, Scope

SCOPE = Scope(
    {"score": Type.FLOAT, "q_idx": Type.INT, "kv_idx": Type.INT}, {"x": BufferType(Type.FLOAT, 1)}
)


@pytest.mark.parametrize(
    ("text", "counted"),
    [
        ("score", {}),
        ("score * 2 + 1 - score", {"multiply": 1, "add, subtract": 2}),
        ("tanh(score / 3) + tanh(score / 3)", {"divide": 1, "tanh": 1, "add, subtract": 1}),
        ("where(q_idx >= kv_idx and not q_idx == 3, score, -score)",
         {"compare": 2, "and, or, not": 2, "choose": 1, "add, subtract": 1}),
        ("score + x[q_idx // 2 + kv_idx]",
         {"add, subtract": 2, "a // b": 1, "read of a buffer": 1}),
        ("score * float(q_idx % 4)", {"multiply": 1, "a % b": 1}),
    ],
)  # fmt: skip
def test_each_is_counted_once(text: str, counted: dict[str, int]) -> None:
    assert operations([parse_expression(text, SCOPE, Type.FLOAT)]) == counted


def test_what_trees_share_is_counted_once() -> None:
    tree = parse_expression("exp(score * 2)", SCOPE, Type.FLOAT)
    assert operations([tree, tree]) == {"multiply": 1, "exp": 1}
