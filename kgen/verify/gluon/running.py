"""The launch under way: the order of its events, and what overlaps it."""

from __future__ import annotations

import itertools
import threading

from kgen.verify.gluon.overlap import Overlap
from kgen.verify.gluon.schedule import Schedule

SEED = 0
"""Of the order of the first launch's events; each launch after it has the next."""


class Running:
    """The state that all partitions share."""

    def __init__(self) -> None:
        self.schedule = Schedule(SEED)
        self.overlap = Overlap()
        self.seeds = itertools.count(SEED)


running = Running()
own = threading.local()
"""Of this thread, which runs a program or a partition of one: its `place` in the grid, and what it has `begun`."""


def explore(seed: int) -> None:
    """Begin with the order of this seed."""
    running.seeds = itertools.count(seed)
