"""Proved facts about indices hold for all small sizes, and ordinary indices are proved."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.specs.trees import INT, bounded, evaluate, index, words

from kgen.expr.index_ranges import IndexRanges
from kgen.expr.nodes import Const, Node, Var

SIZES = frozenset({"B", "HQ", "HKV", "SQ", "SK"})
GREATEST = {
    "b": {"B": 1, "": -1},
    "h": {"HQ": 1, "": -1},
    "kv_idx": {"SK": 1, "": -1},
}
# q_idx may be SQ or more, in rows of the last tile.
DEFINITIONS = {"distance": index("q_idx - kv_idx"), "half": index("kv_idx // 2")}
RANGES = IndexRanges(GREATEST, SIZES, DEFINITIONS)


def everything() -> dict[str, torch.Tensor]:
    """Return every value of every name, for sizes of up to 3."""
    rows = [
        (hq, sq, sk, h, q, kv, offset)
        for hq, sq, sk in product((1, 3), (1, 2, 3), (1, 2, 3))
        for h, q, kv, offset in product(range(hq), range(sq + 3), range(sk), (-7, -1, 0, 2, 9))
    ]
    names = ("HQ", "SQ", "SK", "h", "q_idx", "kv_idx", "offset")
    env = dict(zip(names, torch.tensor(rows).T, strict=True))
    env |= {"B": env["SK"], "b": env["kv_idx"], "HKV": env["HQ"], "window": env["offset"].abs() + 1}
    env |= {name: evaluate(tree, env) for name, tree in DEFINITIONS.items()}
    return env


ALL = everything()
DIVISORS = st.sampled_from(words("q_idx kv_idx h SQ SK HQ offset window 1 2 7 (-1) (-3)"))
LEAVES = DIVISORS | st.just("0")


def larger(part: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    two = "({} + {})", "({} - {})", "({} * {})", "min({}, {})", "max({}, {})"
    return st.one_of(
        *(st.builds(form.format, part, part) for form in two),
        st.builds("({} // {})".format, part, DIVISORS),
        st.builds("({} % {})".format, part, DIVISORS),
        st.builds("abs({})".format, part),
        st.builds("(-{})".format, part),
        st.builds("clamp({}, {}, {})".format, part, part, part),
        st.builds("where({} < {}, {}, {})".format, part, part, part, part),
    )


INDICES = st.deferred(lambda: LEAVES | larger(LEAVES) | larger(LEAVES | larger(LEAVES)))
BOUNDS = st.sampled_from(
    [Var("SQ", INT), Var("SK", INT), Var("HQ", INT), *(Const(n, INT) for n in (1, 2, 8))]
)


def values(tree: Node) -> torch.Tensor | None:
    """Return the values, or None if a divisor is zero."""
    try:
        return evaluate(tree, ALL)
    except RuntimeError:  # torch's error for a division by zero
        return None


@settings(bounded, max_examples=500)
@given(INDICES, BOUNDS)
def test_what_is_proved_holds(text: str, size: Node) -> None:
    tree = index(text)
    not_negative, below = RANGES.not_negative(tree), RANGES.below(tree, size)
    if not (not_negative or below):
        return
    value = values(tree)
    if value is None:
        return
    assert not not_negative or bool((value >= 0).all())
    assert not below or bool((value < evaluate(size, ALL)).all())


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("h", "HQ"),
        ("b", "B"),
        ("kv_idx", "SK"),
        ("kv_idx // 2", "SK"),
        ("min(abs(q_idx - kv_idx), 1023)", "1024"),
        ("clamp(kv_idx - q_idx, -16, 16) + 16", "33"),
        ("clamp(kv_idx - q_idx + 16, 0, 32)", "33"),
        ("q_idx % 8", "8"),
        ("(kv_idx - q_idx) % 8", "8"),
        ("max(min(q_idx, SQ - 1), 0)", "SQ"),
        ("SK - 1 - kv_idx", "SK"),
        ("kv_idx + SQ", "SK + SQ"),
        ("where(kv_idx > q_idx, 1, 0)", "2"),
        ("0", "1"),
        ("HQ - 1", "HQ"),
    ],
)
def test_ordinary_indices_are_proved(text: str, size: str) -> None:
    assert RANGES.not_negative(index(text))
    assert RANGES.below(index(text), index(size))


@pytest.mark.parametrize(
    ("text", "size", "not_negative"),
    [
        ("q_idx", "SQ", True),
        ("kv_idx", "SQ", True),
        ("q_idx - kv_idx", "SQ", False),
        ("kv_idx - 1", "SQ", False),
        ("kv_idx + 1", "SK", True),
        ("offset", "8", False),
        ("2 * kv_idx", "SK", True),
        ("clamp(kv_idx, 0, 32)", "32", True),
    ],
)
def test_what_may_leave_is_not_proved(text: str, size: str, not_negative: bool) -> None:
    assert RANGES.not_negative(index(text)) == not_negative
    assert not RANGES.below(index(text), index(size))


def test_definitions_stand_for_their_expressions() -> None:
    assert RANGES.below(Var("half", INT), Var("SK", INT))
    assert RANGES.not_negative(Var("half", INT))
    assert not RANGES.not_negative(Var("distance", INT))


def test_an_axis_that_may_be_empty_has_no_first_or_last_position() -> None:
    size, zero, last = Var("SK", INT), Const(0, INT), index("SK - 1")
    full = IndexRanges({"kv_idx": {"SK": 1, "": -1}}, frozenset({"SK", "SQ"}))
    empty = replace(full, empty=frozenset({"SK"}))
    assert full.within(zero, "SK")
    assert full.within(last, "SK")
    assert not empty.below(zero, size)
    assert not empty.not_negative(last)
    assert empty.within(zero, "SQ")
    assert empty.within(Var("kv_idx", INT), "SK")
