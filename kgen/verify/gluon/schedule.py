"""A random order of events by seed: steps of partitions, of which one runs at a time, and
asynchronous events.

Each partition and event has a random priority. The runnable one with the highest priority runs.
Sometimes a priority is drawn again. So a load may complete at once or as late as possible, and a
warpgroup may run far ahead. Few seeds find errors that depend on the order of few events. The same
seed gives the same order.

Method: Burckhardt et al., A randomized scheduler with probabilistic guarantees of finding bugs,
ASPLOS 2010.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

CHANGES = 1 / 16
"""Probability that a partition draws a new priority when it yields to others."""


class Stuck(RuntimeError):
    """No partition can continue."""


class _Ended(BaseException):
    """Error in another partition."""


class InFlight:
    """An event that happens once, at any later time, after the event that it follows."""

    def __init__(
        self, happen: Callable[[], None], follows: InFlight | None, priority: float
    ) -> None:
        self.happen, self.follows, self.priority = happen, follows, priority
        self.done = False

    def ready(self) -> bool:
        return self.follows is None or self.follows.done


class _Partition:
    def __init__(self, priority: float) -> None:
        self.priority = priority
        self.go = threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True


class Schedule:
    """Scheduler of one launch of partitions."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._partitions: list[_Partition] = []
        self._in_flight: list[InFlight] = []
        self._own = threading.local()
        self._error: BaseException | None = None
        self._over = threading.Event()

    def run(self, functions: Sequence[Callable[[], None]]) -> None:
        """Run all partitions and their events to the end. Raises the first error of any."""
        self._partitions = [_Partition(self._random.random()) for _ in functions]
        threads = [
            threading.Thread(target=self._live, args=(partition, function))
            for partition, function in zip(self._partitions, functions, strict=True)
        ]
        for thread in threads:
            thread.start()
        self._next(None)
        self._over.wait()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def begin(self, happen: Callable[[], None], follows: InFlight | None = None) -> InFlight:
        """Start an event, and return it."""
        begun = InFlight(happen, follows, self._random.random())
        self._in_flight.append(begun)
        return begun

    def finish(self, begun: InFlight) -> None:
        """Make an event happen, if it has not happened yet."""
        if not begun.done:
            if begun.follows is not None:
                self.finish(begun.follows)
            self._in_flight.remove(begun)
            begun.done = True
            begun.happen()

    def others(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Yield to others, and wait until `ready`. Raises `Stuck` if nothing can make it true."""
        me: _Partition = self._own.partition
        me.ready = ready
        if self._random.random() < CHANGES:
            me.priority = self._random.random()
        self._next(me)
        if self._error is not None:
            raise _Ended

    def _live(self, me: _Partition, function: Callable[[], None]) -> None:
        self._own.partition = me
        me.go.acquire()
        try:
            if self._error is None:
                function()
        except _Ended:
            pass
        except BaseException as error:
            self._error = self._error or error
        self._partitions.remove(me)
        try:
            self._next(None)
        except BaseException as error:
            self._fail(error)

    def _next(self, me: _Partition | None) -> None:
        """Resume the partition with the highest priority.

        Return when that is `me`; at once if `me` is None.
        """
        while True:
            if self._error is not None:
                # Each partition ends at its next turn.
                waiting = [partition for partition in self._partitions if partition is not me]
                if me is None:
                    self._go(waiting[0] if waiting else None)
                return
            there: list[_Partition | InFlight] = [*self._partitions, *self._in_flight]
            able = [one for one in there if one.ready()]
            if not able and not self._partitions:
                return self._go(None)
            if not able:
                raise Stuck("a barrier that nobody completes")
            chosen = max(able, key=lambda x: x.priority)
            if isinstance(chosen, InFlight):
                self.finish(chosen)
            elif chosen is me:
                return None
            else:
                self._go(chosen)
                if me is not None:
                    me.go.acquire()
                return None

    def _go(self, partition: _Partition | None) -> None:
        """Wake a partition; None wakes the thread that waits for all."""
        if partition is None:
            self._over.set()
        else:
            partition.go.release()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._next(None)
