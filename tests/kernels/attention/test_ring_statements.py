"""Waits, skipped tiles and ranges of the Hopper kernels, as trees."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kgen.kernels.attention.schedules.hopper.kernels import RingAt, SkippedRings, next_item
from kgen.kernels.attention.schedules.hopper.loops import ZERO, TileRange
from kgen.kernels.attention.schedules.hopper.operands import Lag
from kgen.targets.code import GLUON, Name, Statement, lines_of, row, uses_of

STREAMS = [RingAt(f"{x}_ring", row("sub", "n_used", "i")) for x in ("bias", "mask")]


def test_tiles_of_one_ring_are_skipped_at_once() -> None:
    skip = SkippedRings("kv_ring").skip("n_past")
    assert skip.lines(GLUON) == ["n_used = _consumer_skip(kv_ring, n_used, n_past)"]
    assert (skip.defines, skip.uses) == ({"n_used"}, {"kv_ring", "n_used", "n_past"})


@pytest.mark.parametrize(("fewer", "at"), [(0, "n_used - i"), (1, "n_used - i - 1")])
def test_tiles_of_several_rings_are_skipped_in_turn(fewer: int, at: str) -> None:
    skip = SkippedRings("kv_ring", STREAMS).skip("n_ahead", fewer)
    assert skip.lines(GLUON) == [
        "for _ in range(n_ahead):  # in the order in which the producer loads them",
        f"    _consumer_skip(bias_ring, {at}, 1)",
        f"    _consumer_skip(mask_ring, {at}, 1)",
        "    n_used = _consumer_skip(kv_ring, n_used, 1)",
    ]
    assert {"n_ahead", "bias_ring", "mask_ring", "kv_ring", "n_used", "i"} <= skip.uses


@pytest.mark.parametrize(("given", "uses"), [(False, set()), (True, {"LAG", "0"})])
def test_waits_of_a_producer(given: bool, uses: set[str]) -> None:
    lag = Lag(1, given)
    statements: list[Statement] = [*lag.constant, lag.counter_wait, *lag.last_wait]
    assert uses_of(statements) == uses
    waits = [line for line in lines_of(statements, GLUON) if "gdc_wait()" in line]
    assert len(waits) == 1 + given
    assert ("LAG: tl.constexpr = 1" in lines_of(statements, GLUON)) is not given


def test_the_next_tile_is_a_statement() -> None:
    (in_turn,) = next_item(False, Name("counter"))
    assert isinstance(in_turn, Statement)
    assert in_turn.lines(GLUON) == ["number += gl.num_programs(0)"]
    *_, counted = next_item(True, row("add", "counter", 1))
    assert isinstance(counted, Statement)
    assert counted.uses == {"counter", "1"}


@pytest.mark.parametrize(
    ("side", "block", "length"), [("q", "BLOCK_M", "SQ"), ("kv", "BLOCK_N", "problem.SK")]
)
def test_both_producers_find_the_ends_of_a_range_in_one_way(
    side: str, block: str, length: str
) -> None:
    whole = TileRange(ZERO, Name("n"), [], True, Name("n"), Name("end"))
    assert whole.last_position(side, block, length) == whole.masked_at_start(block) == []
    part = replace(whole, last=True, head=Name("head"))
    found = [*part.last_position(side, block, length), *part.masked_at_start(block)]
    assert lines_of(found, GLUON) == [
        f"{side}_last = gl.minimum({side}_start + {block}, {length}) - 1",
        f"n_first_masked = (head) // {block}",
    ]
    assert {f"{side}_start", length, "head"} <= uses_of(found)
