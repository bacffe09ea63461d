"""The launch under way: the order of its events, what overlaps it, and what each of its partitions has begun."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING

from torch import Tensor

from kgen.verify.gluon.overlap import Overlap
from kgen.verify.gluon.schedule import InFlight, Schedule

if TYPE_CHECKING:
    from kgen.verify.gluon.memory import Barriers, Loading
    from kgen.verify.gluon.products import Product

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


class Begun:
    """What one partition has under way, oldest first."""

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.stores: list[InFlight] = []
        self.loads: list[Loading] = []
        self.unfenced: list[Tensor] = []
        self.barriers: list[Barriers] = []
