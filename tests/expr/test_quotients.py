"""One form for quotients: shifts, bits, nested quotients and block starts become a quotient by one
number.
"""

from __future__ import annotations

import pytest
import torch
from support.specs.trees import draw_env, evaluate, grid, index, mask, score

from kgen.expr.canonical import condition, value

SAME = {
    "q_idx // 64": (
        "q_idx >> 6",
        "q_idx // 8 // 8",
        "(q_idx >> 2) >> 4",
        "(q_idx >> 3) // 8",
    ),
    "q_idx % 8": ("q_idx & 7", "7 & q_idx"),
    "64 * (q_idx // 64)": ("q_idx - q_idx % 64", "q_idx & -64", "-(q_idx % 64 - q_idx)"),
    "4 * ((q_idx + 3) // 4)": ("q_idx + 3 - (q_idx + 3) % 4", "q_idx - (q_idx + 3) % 4 + 3"),
    "window * (q_idx // window)": ("q_idx - q_idx % window",),
    "q_idx": ("q_idx * window // window", "window * q_idx // window"),
    "q_idx // (-3)": ("q_idx * offset // offset // (-3)",),
}
COMPARED = {
    "q_idx // 64 == kv_idx // 64": (
        "q_idx >> 6 == kv_idx >> 6",
        "q_idx - q_idx % 64 == kv_idx - kv_idx % 64",
        "(q_idx & -64) == (kv_idx & -64)",
        "kv_idx // 8 // 8 - (q_idx >> 6) == 0",
        "64 * (q_idx // 64) == kv_idx - kv_idx % 64",
        "2 * q_idx - 2 * (q_idx % 64) == (kv_idx >> 6) << 7",
    ),
    "q_idx // window != kv_idx // window": ("q_idx - q_idx % window != kv_idx - kv_idx % window",),
    "q_idx >= 2 * kv_idx": ("q_idx >= kv_idx << 1", "q_idx * 2 >= kv_idx << 2"),
}
APART = (
    *(
        "q_idx // 2 // (-3)",
        "q_idx // (-2) // 3",
        "(q_idx * 1103515245) >> 16",
        "(q_idx << 20) >> 6",
    ),
    *(
        "q_idx & 5",
        "q_idx & 0",
        "q_idx & -1",
        "q_idx - kv_idx % 4",
        "q_idx + q_idx % 4",
        "2 * q_idx - q_idx % 4",
        "q_idx >> 31",
    ),
    *(
        "(q_idx * kv_idx) & 7",
        "q_idx * window // offset",
        "q_idx >> kv_idx",
        "q_idx // 65536 // 65536",
    ),
)
"""Texts that stay as written, because the value may wrap or the parts do not belong together."""


@pytest.mark.parametrize("text", SAME)
def test_other_words_for_a_value(text: str) -> None:
    wanted = value(index(text))
    assert [other for other in SAME[text] if value(index(other)) != wanted] == []


@pytest.mark.parametrize("text", COMPARED)
def test_other_words_for_a_condition(text: str) -> None:
    wanted = condition(mask(text))
    assert [other for other in COMPARED[text] if condition(mask(other)) != wanted] == []


@pytest.mark.parametrize("text", APART)
def test_what_is_none_stays(text: str) -> None:
    assert value(index(text)) == index(text)


@pytest.mark.parametrize(
    "text", [*SAME, *(other for others in SAME.values() for other in others), *APART]
)
def test_values_are_the_same(text: str) -> None:
    tree, env = index(text), draw_env(1, 300, 300) | {"offset": -5, "window": 7} | grid(300, 8)
    for moved in (0, -150, 70_000):  # also negative numbers
        positions = env | {"q_idx": env["q_idx"] + moved}
        assert torch.equal(evaluate(value(tree), positions), evaluate(tree, positions))


def test_a_shift_to_the_left_stays_in_a_score() -> None:
    """A shift may wrap, but kgen assumes that a product fits, and the value becomes real."""
    tree = score("score + float(kv_idx << 3)")
    assert value(tree) == tree
