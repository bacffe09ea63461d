"""State of the current launch: the order of its events, and overlapping launches."""

from __future__ import annotations

import itertools
import threading

from kgen.verify.gluon.overlap import Overlap
from kgen.verify.gluon.schedule import Schedule

SEED = 0
"""Seed of the first launch. Each following launch has the next seed."""


class Running:
    """State that all partitions share."""

    def __init__(self) -> None:
        self.schedule = Schedule(SEED)
        self.overlap = Overlap()
        self.seeds = itertools.count(SEED)


running = Running()
own = threading.local()
"""State of the thread of a program or partition: its `place` in the grid, and its events in flight
(`begun`).
"""


def explore(seed: int) -> None:
    """Use this seed for the next launch."""
    running.seeds = itertools.count(seed)
