"""Minus infinity in a score is a condition of the mask."""

from __future__ import annotations

import pytest

from kgen.expr.canonical import canonical
from kgen.expr.nodes import Type
from kgen.expr.parse import parse_expression
from kgen.expr.scope import Scope
from kgen.expr.unparse import show

NAMES = dict.fromkeys(("q_idx", "kv_idx", "h", "b"), Type.INT) | {"score": Type.FLOAT}
SCORES = [
    ("-inf", "score", "False"),
    ("where(h > 2, -inf, -inf)", "score", "False"),
    ("where(h > 2, where(False, score, -inf), -inf)", "score", "False"),
    ("score + where(q_idx >= kv_idx, 0.0, -inf)", "score", "q_idx >= kv_idx"),
    ("where(q_idx >= kv_idx, 0, -inf) + 2.0 * score", "2.0 * score", "q_idx >= kv_idx"),
    ("where(q_idx >= kv_idx, score, -inf) - 1.0", "score - 1.0", "q_idx >= kv_idx"),
    (
        "where(q_idx >= kv_idx, 1.0, -inf) + where(h > 2, -inf, score)",
        "score + 1.0",
        "h < 3 and q_idx >= kv_idx",
    ),
    ("min(score, where(q_idx >= kv_idx, 1.0, -inf))", "min(score, 1.0)", "q_idx >= kv_idx"),
    (
        "where(h > 2, where(q_idx >= kv_idx, score, -inf), score)",
        "score",
        "h < 3 or q_idx >= kv_idx",
    ),
    (
        "where(h > 2, score, where(q_idx >= kv_idx, score, -inf))",
        "score",
        "h >= 3 or q_idx >= kv_idx",
    ),
    ("where(h > 2, 3, -inf) + score", "score + 3.0", "h >= 3"),
    (
        "where(h > 2, where(q_idx >= kv_idx, score, -inf), 2.0 * score)",
        "where(h >= 3, score, 2.0 * score)",
        "h < 3 or q_idx >= kv_idx",
    ),
    ("where(score > 0.0, score, -inf)", "where(score > 0.0, score, -inf)", None),
    ("score - where(q_idx >= kv_idx, 0.0, inf)", "score - where(q_idx >= kv_idx, 0.0, inf)", None),
]


@pytest.mark.parametrize(("written", "score", "mask"), SCORES)
def test_a_score_and_its_mask(written: str, score: str, mask: str | None) -> None:
    scope = Scope(NAMES, {})
    found = canonical({"score_mod": parse_expression(written, scope, Type.FLOAT)})
    assert {name: show(tree) for name, tree in found.items()} == {
        "score_mod": score,
        **({} if mask is None else {"mask_mod": mask}),
    }
