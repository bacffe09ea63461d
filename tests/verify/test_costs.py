from __future__ import annotations

import pytest

from kgen.verify.costs import CASE, CHECKS, Costs

CASES = [("forward", "a"), ("forward", "opcheck"), ("backward", "a"), ("forward", "a")]


def test_a_check_counts_as_many_cases() -> None:
    costs = Costs(CASES)
    assert costs.progress() == (0, 3 * CASE + CHECKS["opcheck"])
    costs.done(("forward", "opcheck"), CHECKS["opcheck"])
    spent, whole = costs.progress()
    assert spent / whole > 0.9


def test_a_case_takes_what_it_took_in_another_file() -> None:
    costs = Costs([("forward", "a"), ("forward", "a")])
    costs.done(("forward", "a"), 10.0)
    assert costs.progress() == (10.0, 20.0)


def test_a_slow_machine_is_slow_for_all() -> None:
    costs = Costs([("forward", "a"), ("forward", "b")])
    costs.done(("forward", "a"), 10 * CASE)
    assert costs.progress() == pytest.approx((10 * CASE, 20 * CASE))


def test_the_end_is_the_whole() -> None:
    costs = Costs(CASES)
    before = 0.0
    for case, seconds in zip(CASES, (1.0, None, 0.0, 2.5), strict=True):
        costs.done(case, seconds)
        spent, _ = costs.progress()
        assert spent >= before
        before = spent
    assert costs.progress()[0] == costs.progress()[1]
