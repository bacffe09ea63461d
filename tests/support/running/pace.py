"""Time limits relative to the speed of this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


def pace() -> float:
    """Return how many times slower this machine is at present than the reference; at least 1."""
    start, seen = time.process_time(), {}
    for i in range(400_000):  # the objects of expression trees
        seen[i % 1000, "x"] = (i, seen.get((i % 997, "x")), None)[0]
    return max(1.0, (time.process_time() - start) / 0.075)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Assert that the block takes at most `seconds` of processor time, scaled by the pace before or
    after it.
    """
    before, start = pace(), time.process_time()
    try:
        yield
    finally:
        took = time.process_time() - start
        assert took < seconds * max(before, pace())
