"""Transfers of keys to the ranks that need them, and of gradients to the ranks that own the
keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import nullcontext, suppress
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .key_gradients import KeyGradients, homeward
from .partial_sums import Sum, copied, run_of
from .peer_memory import Peers, aligned, peers_of
from .planning import Pair
from .sharding import Interval, merged
from .transfers import Beside, Keys, empty_rows_first, exchanged, kept_with_plan, rows_first

Steps = Generator[tuple[Pair, Tensor, Tensor], None, None]
"""Pairs of a rank, with their keys and values."""
BRIEF = 2**20
"""Bytes per rank up to which kernels read keys directly in peer memory. A second stream would cost
more CPU time.
"""


def steps(keys: Keys, agreed: Callable[[], None], home: KeyGradients | None = None) -> Steps:
    """Yield the pairs of this rank with their keys and values: own keys first, then those of
    others.

    Nothing is sent before all ranks have `agreed`. The transfer of a step starts before the
    previous step computes, so that both overlap. Kernels that occupy all multiprocessors block a
    transfer that starts after them. `home` sends the gradients of a step when it ends.

    A caller that closes the generator early waits for running transfers. `abandon` does not wait,
    because the other end of a transfer may be missing.
    """
    beside = Beside(keys.k.device)
    found = _gathered_pairs if keys.plan.gathered else _pairs_by_steps
    try:
        yield from found(keys, beside, agreed, home)
    except GeneratorExit:
        beside.end()
        raise
    beside.end()


class _Abandoned(Exception):
    pass


def abandon(steps: Steps) -> None:
    """Stop the generator without waiting for transfers."""
    with suppress(Exception):
        steps.throw(_Abandoned())


def _pairs_by_steps(
    keys: Keys, beside: Beside, agreed: Callable[[], None], home: KeyGradients | None
) -> Steps:
    """Yield pairs whose keys come from one rank after the other."""
    plan, rank, ranks = keys.plan, keys.rank, keys.plan.ranks
    peers = peers_of(keys.group, keys.k.device, _room_of_few(keys), agreed) if plan.few else None
    way = _Sent(keys, beside) if peers is None else _Read(keys, beside, peers)
    own = ((pair, *keys.own(pair.kv)) for pair in plan.pairs_of(rank, rank))
    if way.in_line:  # descriptions of the other ranks arrive meanwhile
        yield from own
    agreed()
    beside.begin()
    way.begin(home)
    shared = _Shared(keys, beside, way)
    next_step = _Step(keys, beside, way, 1) if ranks > 1 else None
    beside.wait()
    yield from own
    yield from shared.pairs(home)
    for number in range(1, ranks):
        step = next_step
        assert step is not None
        next_step = _Step(keys, beside, way, number + 1) if number + 1 < ranks else None
        yield from step.pairs(home)
        if home is not None:
            beside.lead(home.send(number))
    way.end(home)


class _Sent:
    """Transfers of keys by send and receive."""

    in_line = False

    def __init__(self, keys: Keys, beside: Beside) -> None:
        plan, rank = keys.plan, keys.rank
        runs = [
            *plan.shared_by(rank),
            *(run for other in keys.others for run in plan.sent(rank, other)),
        ]
        self.keys, self.beside = keys, beside
        self.leaving = {run: [x.contiguous() for x in keys.own(run)] for run in runs}

    def begin(self, home: KeyGradients | None) -> None:
        """Start after all ranks have agreed: there is nothing to do."""

    def step(
        self, source: int, target: int, intervals: list[Interval]
    ) -> tuple[list[tuple[Tensor, Tensor]], list[Any]]:
        """Start receiving runs of keys from `source`, and sending to `target`.

        Returns the received keys and values of each run, and the works.
        """
        sent = [
            (target, x)
            for run in self.keys.plan.sent(self.keys.rank, target)
            for x in self.leaving[run]
        ]
        with self.beside.stream() if sent or intervals else nullcontext():
            here = [self.keys.empty(interval) for interval in intervals]
            received = [(source, x) for pair in here for x in pair]
            return here, exchanged(self.keys.group, sent, received)

    def end(self, home: KeyGradients | None) -> None:
        """Finish after all keys were used: there is nothing to do."""


class _Read:
    """Transfers of keys and gradients by reading the buffers of other ranks."""

    leaving: Mapping[Interval, list[Tensor]] = MappingProxyType({})

    def __init__(self, keys: Keys, beside: Beside, peers: Peers) -> None:
        self.keys, self.beside, self.peers = keys, beside, peers
        self.in_line = peers.begin(brief=_most_bytes(keys) <= BRIEF)
        if self.in_line:
            beside.in_line()
        for run, tensors in self._left(keys.rank).items():
            for rows, there in zip(keys.own(run), tensors, strict=True):
                copied(there.movedim(0, keys.axis), rows)

    def begin(self, home: KeyGradients | None) -> None:
        """Open the buffers after all ranks have agreed."""
        self.beside.under_way.append([self.peers.open()])
        if home is not None:
            home.read(self.peers, lambda rank: left(self.keys, rank)[1])

    def step(
        self, source: int, target: int, intervals: list[Interval]
    ) -> tuple[list[tuple[Tensor, Tensor]], list[Any]]:
        """Return runs of keys of `source`, and the works.

        The tensors are views of its buffer if kernels read it directly, and otherwise targets of
        copies.
        """
        axis, found = self.keys.axis, []
        copies: list[tuple[Tensor, Tensor]] = []
        for lo, hi in intervals:
            (first, _), run = next(
                (run, x) for run, x in self._left(source).items() if run[0] <= lo and hi <= run[1]
            )
            k, v = there = [run_of(x, 0, (lo - first, hi - first)) for x in run]
            if not self.in_line:
                with self.peers.stream():
                    k, v = (empty_rows_first(x, axis, hi - lo) for x in (self.keys.k, self.keys.v))
                copies += zip((k, v), there, strict=True)
            found.append((k.movedim(0, axis), v.movedim(0, axis)))
        return found, [self.peers.copy(copies)] if copies else []

    def end(self, home: KeyGradients | None) -> None:
        """Close the buffers after all keys were used, or start to collect gradients."""
        if home is None:
            self.beside.at_end.append(self.peers.close())
        else:
            self.beside.lead(home.collect())

    def _left(self, rank: int) -> dict[Interval, list[Tensor]]:
        """Return views of the keys and values in a rank's buffer, rows first, by run."""
        axis, found = self.keys.axis, {}
        for (lo, hi), offsets in left(self.keys, rank)[0].items():
            shapes = [rows_first(x, axis, hi - lo) for x in (self.keys.k, self.keys.v)]
            dtypes = self.keys.k.dtype, self.keys.v.dtype
            found[lo, hi] = [
                self.peers.view(rank, *one) for one in zip(offsets, shapes, dtypes, strict=True)
            ]
        return found


@kept_with_plan
def left(keys: Keys, rank: int) -> tuple[dict[Interval, list[int]], int]:
    """Return the layout of a rank's buffer: the offsets of keys and values of each run that others
    need, and the end.

    Offsets are in bytes.
    """
    end, found = 0, dict[Interval, list[int]]()
    for lo, hi in merged(
        run for other in range(keys.plan.ranks) for run in keys.plan.sent(rank, other)
    ):
        found[lo, hi] = []
        for x in (keys.k, keys.v):
            found[lo, hi].append(end)
            end += aligned(rows_first(x, keys.axis, hi - lo), x.dtype)
    return found, end


@kept_with_plan
def _most_bytes(keys: Keys) -> int:
    """Return the most bytes of keys and values that any rank receives."""
    most = max(map(keys.plan.received, range(keys.plan.ranks)))
    return sum(
        math.prod(rows_first(x, keys.axis, most)) * x.element_size() for x in (keys.k, keys.v)
    )


@kept_with_plan
def _room_of_few(keys: Keys) -> int:
    """Return the bytes of a buffer for keys that others need, followed by gradients of others'
    keys.
    """
    return max(homeward(keys, rank, left(keys, rank)[1])[1] for rank in range(keys.plan.ranks))


class _Step:
    """The keys of step `number`: from rank `rank - number`, while rank `rank + number` gets keys of
    this rank.
    """

    def __init__(self, keys: Keys, beside: Beside, way: _Sent | _Read, number: int) -> None:
        plan, rank, ranks = keys.plan, keys.rank, keys.plan.ranks
        self.keys, self.beside = keys, beside
        self.source, target = (rank - number) % ranks, (rank + number) % ranks
        self.intervals = plan.sent(self.source, rank)
        self.here, self.works = way.step(self.source, target, self.intervals)
        self.received = [x for pair in self.here for x in pair]
        beside.under_way.append(self.works)

    def pairs(self, home: KeyGradients | None) -> Iterator[tuple[Pair, Tensor, Tensor]]:
        """Wait for these keys, and yield their pairs."""
        if self.received:
            self.beside.wait(self.works, self.received)
        yield from _pairs_in(self.keys, self.source, self.intervals, self.here, home)


def _pairs_in(
    keys: Keys,
    source: int,
    intervals: list[Interval],
    here: list[tuple[Tensor, Tensor]],
    home: KeyGradients | None,
) -> Iterator[tuple[Pair, Tensor, Tensor]]:
    """Yield pairs with received keys of another rank. `here` has the tensors of each interval."""
    if home is not None and intervals:
        home.begin(source, intervals, here)
    for pair in keys.plan.pairs_of(keys.rank, source):
        for (lo, hi), tensors in zip(intervals, here, strict=True):
            for first, last in merged([pair.kv], lo, hi):
                k, v = (run_of(x, keys.axis, (first - lo, last - lo)) for x in tensors)
                yield Pair(keys.rank, source, pair.q, (first, last)), k, v


class _Shared:
    """Keys that all ranks need, broadcast once."""

    def __init__(self, keys: Keys, beside: Beside, way: _Sent | _Read) -> None:
        self.keys, self.beside = keys, beside
        self.here: list[tuple[int, Interval, tuple[Tensor, Tensor]]] = []
        self.works: list[Any] = []
        beside.under_way.append(self.works)
        if not keys.plan.shared:
            return
        with beside.stream():
            for source, interval in keys.plan.shared:
                k, v = way.leaving[interval] if source == keys.rank else keys.empty(interval)
                root = dist.get_global_rank(keys.group, source)
                for x in (k, v):
                    self.works.append(dist.broadcast(x, root, group=keys.group, async_op=True))
                self.here.append((source, interval, (k, v)))

    def pairs(self, home: KeyGradients | None) -> Iterator[tuple[Pair, Tensor, Tensor]]:
        """Wait for these keys, and yield their pairs."""
        if self.here:
            self.beside.wait(self.works, [x for _, _, tensors in self.here for x in tensors])
        for source in dict.fromkeys(source for source, _, _ in self.here):
            mine = [(interval, tensors) for s, interval, tensors in self.here if s == source]
            intervals = [interval for interval, _ in mine]
            if source != self.keys.rank:
                yield from _pairs_in(
                    self.keys, source, intervals, [tensors for _, tensors in mine], home
                )
            if home is not None:
                for interval in intervals:
                    home.reduce(source, interval)
                home.open.pop(source, None)


def _gathered_pairs(
    keys: Keys, beside: Beside, agreed: Callable[[], None], home: KeyGradients | None
) -> Steps:
    """Yield pairs whose keys of all ranks come at once, into tensors indexed by position."""
    plan, rank, axis = keys.plan, keys.rank, keys.axis
    calls = plan.calls(rank, back=home is not None)
    leaving = [(other, interval) for other in keys.others for interval in plan.sent(rank, other)]
    coming = [(other, interval) for other in keys.others for interval in plan.sent(other, rank)]
    peers = peers_of(keys.group, keys.k.device, _room(keys), agreed)
    if peers is not None:
        peers.begin()
    whole = _whole(keys, peers, rank)
    used = merged([*(run for _, run in calls.rest), *(interval for _, interval in leaving)])
    for run in (run for part in plan.kv.parts[rank] for run in merged(used, *part)):
        for rows, everything in zip(keys.own(run), whole, strict=True):
            copied(run_of(everything, 0, run).movedim(0, axis), rows)
    agreed()
    beside.begin()
    with beside.stream():
        if peers is None:
            sent, received = (
                [(other, run_of(x, 0, interval)) for other, interval in which for x in whole]
                for which in (leaving, coming)
            )
            works = exchanged(keys.group, sent, received)
        else:
            copies = [
                (run_of(here, 0, run), run_of(there, 0, run))
                for other, run in coming
                for here, there in zip(whole, _whole(keys, peers, other), strict=True)
            ]
            peers.open()
            works = [peers.copy(copies)]
            beside.at_end.append(peers.close())
    beside.under_way.append(works)
    if home is not None:
        k, v = (x.movedim(0, axis) for x in whole)
        home.gathered = Sum(k.shape, k, axis), Sum(v.shape, v, axis)
        if peers is not None:
            home.read(peers, lambda rank: 0)
    beside.wait()
    for queries, run in calls.first:
        yield Pair(rank, rank, queries, run), *keys.own(run)
    beside.wait(works)
    for queries, run in calls.rest:
        # The owner of the keys does not matter here.
        yield Pair(rank, rank, queries, run), *(run_of(x, 0, run).movedim(0, axis) for x in whole)
    if home is not None:
        beside.lead(home.scatter())
    for queries, run in calls.last:
        yield Pair(rank, rank, queries, run), *keys.own(run)


def _whole(keys: Keys, peers: Peers | None, rank: int) -> list[Tensor]:
    """Return tensors for the keys and values of all ranks, rows first; with peers, in a rank's
    buffer.
    """
    found, offset = [], 0
    for x in (keys.k, keys.v):
        shape = rows_first(x, keys.axis, keys.plan.kv.length)
        found.append(
            x.new_empty(shape) if peers is None else peers.view(rank, offset, shape, x.dtype)
        )
        offset += aligned(shape, x.dtype)
    return found


@kept_with_plan
def _room(keys: Keys) -> int:
    """Return the bytes of a buffer for all keys and values, which gradients of others' keys reuse
    later.
    """
    shapes = [(rows_first(x, keys.axis, keys.plan.kv.length), x.dtype) for x in (keys.k, keys.v)]
    most = max(homeward(keys, sender)[1] for sender in range(keys.plan.ranks))
    return max(most, sum(aligned(shape, dtype) for shape, dtype in shapes))
