from __future__ import annotations

import pytest

from kgen.verify.gluon.schedule import Schedule, Stuck


def _order(seed: int, count: int = 3, steps: int = 6) -> str:
    """Who made each step."""
    schedule, found = Schedule(seed), []

    def partition(name: str) -> None:
        for _ in range(steps):
            found.append(name)
            schedule.others()

    schedule.run([lambda name=name: partition(name) for name in "abcdefg"[:count]])
    return "".join(found)


def test_a_seed_is_one_order_of_many() -> None:
    orders = [_order(seed) for seed in range(40)]
    assert orders == [_order(seed) for seed in range(40)]
    assert len(set(orders)) > 10
    # Each is the first in some, and one may be done before another begins.
    assert {order[0] for order in orders} == set("abc")
    assert any(order.rindex("a") < order.index("b") for order in orders)


@pytest.mark.parametrize("late", [False, True])
def test_what_is_in_flight_may_happen_at_once_or_last(late: bool) -> None:
    def happened(seed: int) -> list[str]:
        schedule, found = Schedule(seed), []

        def partition() -> None:
            first = schedule.begin(lambda: found.append("first"))
            schedule.begin(lambda: found.append("second"), first)
            schedule.others()
            found.append("own")
            schedule.finish(first)

        schedule.run([partition])
        return found

    found = [happened(seed) for seed in range(20)]
    assert all(sorted(one) == ["first", "own", "second"] for one in found)
    assert all(one.index("first") < one.index("second") for one in found)
    assert (["own", "first", "second"] if late else ["first", "second", "own"]) in found


def test_nobody_can_go_on() -> None:
    schedule = Schedule(0)
    ended = []

    def waits() -> None:
        try:
            schedule.others(lambda: False)
        finally:
            ended.append("waits")

    with pytest.raises(Stuck, match="nobody completes"):
        schedule.run([waits, lambda: schedule.others(), waits])
    assert ended == ["waits", "waits"]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("lands", [False, True])
def test_the_first_error_is_raised_and_all_end(seed: int, lands: bool) -> None:
    schedule = Schedule(seed)

    def fails() -> None:
        raise ValueError("wrong")

    def begins() -> None:
        schedule.begin(fails)
        schedule.others(lambda: False)

    with pytest.raises(ValueError, match="wrong"):
        schedule.run([lambda: schedule.others(lambda: False), begins if lands else fails])
