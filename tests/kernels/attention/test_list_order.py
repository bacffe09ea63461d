"""The order of block lists: proved for the emitted code, refuted with planted errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import z3

from kgen.kernels.attention.prove import list_order
from kgen.kernels.attention.prove.list_order import PART, Listed, each_block_once, each_tile_once
from kgen.prove.obligations import Verdict, decide

TEMPLATES = Path(__file__).resolve().parents[3] / "templates/attention"
LINES = {
    "triton/_block_mask.j2": (
        "absent = column - ones - twos + n_partial + n_full",
        "place = tl.where(kind == 1, ones - 1, tl.where(kind == 2, n_partial + twos - 1, absent))",
    ),
    "portable/_listed_tiles.j2": (
        "_start = i + (tl.load({{ name }}_blocks + i // BLOCK_SIZE) - i // BLOCK_SIZE) * "
        "BLOCK_SIZE",
    ),
    "hopper/_shared.j2": (
        "return gl.load(blocks + i * BLOCK // BLOCK_SIZE) * BLOCK_SIZE + i * BLOCK % BLOCK_SIZE",
    ),
}


@pytest.fixture(autouse=True)
def _stated_anew() -> Iterator[None]:
    """Clear cached claims about tiles before and after a test, because the test plants errors in
    them.
    """
    list_order._visits.cache_clear()
    yield
    list_order._visits.cache_clear()


def verdicts(block: int = 64) -> list[Verdict]:
    stated = [each_block_once("lists", "once"), each_tile_once("forward", "once", block, True)]
    return [decide(one, 10.0).verdict for one in stated]


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_it_is_proved(block: int) -> None:
    assert verdicts(block) == [Verdict.PROVED] * 2


def test_facts_can_be_true() -> None:
    row = Listed(z3.Int("size"))
    row.stored(row.column("a")), row.named(PART, z3.Int("entry"), "b")
    solver = z3.Solver()
    solver.add(*row.facts, row.columns > 3, z3.Int("a") != z3.Int("b"))
    assert solver.check() == z3.sat


def test_two_kinds_in_one_place_are_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full blocks that are not stored after the partial ones."""
    place = Listed.place
    monkeypatch.setattr(
        Listed, "place", lambda row, c: z3.If(row.kind(c) == 2, row._count(2, c) - 1, place(row, c))
    )
    assert verdicts()[0] is Verdict.REFUTED


def test_tiles_that_overlap_are_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Listed.start

    def earlier(row: Listed, first: Any, i: Any) -> Any:
        return start(row, first, i) - z3.If(i % 128 == 64, 1, 0)

    monkeypatch.setattr(Listed, "start", earlier)
    assert verdicts()[1] is Verdict.REFUTED


def test_a_list_without_its_mask_is_refuted() -> None:
    assert decide(each_tile_once("forward", "once", 64, False), 10.0).verdict is Verdict.REFUTED


@pytest.mark.parametrize("template", LINES)
def test_templates_have_these_lines(template: str) -> None:
    text = (TEMPLATES / template).read_text()
    assert all(line in text for line in LINES[template])
