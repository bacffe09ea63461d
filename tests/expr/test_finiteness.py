"""Values that may be infinite or NaN, although the scores are finite."""

from __future__ import annotations

import pytest
from support.specs.trees import score

from kgen.expr.finiteness import may_be_nan, sign
from kgen.expr.nodes import children

FINITE = (
    "score * 0.5",
    "score / HQ + h",
    "exp2(-8 * (h + 1) / HQ)",
    "tanh(score) * kv_idx",
    "exp(-abs(score))",
)
OPEN = (
    "score / SQ",
    "log(float(SK))",
    "slopes[h] * score",
    "1 / q_idx",
    "exp(score)",
    "exp(q_idx - kv_idx)",
    "-inf",
)


@pytest.mark.parametrize("text", FINITE)
def test_finite_everywhere(text: str) -> None:
    assert not may_be_nan(score(text))


@pytest.mark.parametrize("text", OPEN)
def test_not_finite_somewhere(text: str) -> None:
    assert may_be_nan(score(text))


def test_a_divisor_that_is_not_zero() -> None:
    assert may_be_nan(score("score / cap"))
    assert not may_be_nan(score("score / cap"), {"cap"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-8 * (h + 1)", -1),
        ("h + 1", 1),
        ("h - 1", 0),
        ("-h - 8", -1),
        ("score", 0),
        ("abs(score) * h", 1),
    ],
)
def test_signs(text: str, expected: int) -> None:
    """Integers have signs too, converted to real numbers."""
    node = score(f"exp({text})")
    assert sign(children(node)[0]) == expected
