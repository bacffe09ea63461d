"""Bounds in seconds, of a machine that counts to ten million in a quarter of one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


def pace() -> float:
    """How many times as long this machine takes just now; 1 for a faster one."""
    start, seen = time.process_time(), {}
    for i in range(400_000):  # what trees are made of: numbers, tuples, dictionaries
        seen[i % 1000, "x"] = (i, seen.get((i % 997, "x")), None)[0]
    return max(1.0, (time.process_time() - start) / 0.075)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """What takes no more of this process, at the pace that the machine has before it or after."""
    before, start = pace(), time.process_time()
    try:
        yield
    finally:
        took = time.process_time() - start
        assert took < seconds * max(before, pace())
