"""How keys come to the ranks that need them, and gradients to where the keys are."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .home import Home, homeward
from .peers import Peers, aligned, peers_of
from .planning import Pair
from .sharding import Interval, merged
from .sums import Sum, copied, run_of
from .transfers import Beside, Keys, exchanged, rows_first

Steps = Generator[tuple[Pair, Tensor, Tensor], None, None]
"""Pairs of a rank, with their keys and values."""


def steps(keys: Keys, agreed: Callable[[], None], home: Home | None = None) -> Steps:
    """Pairs of this rank with their keys and values: first its own, then those of others.

    Nothing is sent before all have `agreed`. What a step takes was asked for before the step ahead of it, so that it
    comes while that one computes: kernels that have all of a GPU leave nothing to a transfer that begins after them.
    `home` gets the gradients of a step as soon as it is over. Whoever stops ahead of the last pair waits for what is
    under way, unless it abandons that: of a transfer that failed, others may not come to an end.
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
    """Stop, and wait for nothing."""
    with suppress(Exception):
        steps.throw(_Abandoned())


def _pairs_by_steps(keys: Keys, beside: Beside, agreed: Callable[[], None], home: Home | None) -> Steps:
    """Pairs of keys that come from one rank after the other."""
    plan, rank, ranks = keys.plan, keys.rank, keys.plan.ranks
    runs = [*plan.shared_by(rank), *(run for other in keys.others for run in plan.sent(rank, other))]
    leaving = {run: [x.contiguous() for x in keys.own(run)] for run in runs}
    agreed()
    beside.begin()
    shared = _Shared(keys, leaving, beside)
    next_step = _Step(keys, leaving, beside, 1) if ranks > 1 else None
    beside.wait()
    for pair in plan.pairs_of(rank, rank):
        yield pair, *keys.own(pair.kv)
    yield from shared.pairs(home)
    for number in range(1, ranks):
        step = next_step
        assert step is not None
        next_step = _Step(keys, leaving, beside, number + 1) if number + 1 < ranks else None
        yield from step.pairs(home)
        if home is not None:
            home.send(number)


Leaving = dict[Interval, list[Tensor]]
"""Keys and values of a rank, in one piece each."""


class _Step:
    """The exchange of keys in one step: to the rank that many behind this one, from the one as many ahead."""

    def __init__(self, keys: Keys, leaving: Leaving, beside: Beside, number: int) -> None:
        plan, rank, ranks = keys.plan, keys.rank, keys.plan.ranks
        self.keys, self.beside = keys, beside
        self.source, target = (rank - number) % ranks, (rank + number) % ranks
        self.intervals = plan.sent(self.source, rank)
        sent = [(target, x) for interval in plan.sent(rank, target) for x in leaving[interval]]
        with beside.stream() if sent or self.intervals else nullcontext():
            self.here = [keys.empty(interval) for interval in self.intervals]
            self.received = [x for pair in self.here for x in pair]
            self.works = exchanged(keys.group, sent, [(self.source, x) for x in self.received])
        beside.under_way.append(self.works)

    def pairs(self, home: Home | None) -> Iterator[tuple[Pair, Tensor, Tensor]]:
        """What is attended to of these keys, once they are there."""
        if self.received:
            self.beside.wait(self.works, self.received)
        yield from _pairs_in(self.keys, self.source, self.intervals, self.here, home)


def _pairs_in(
    keys: Keys, source: int, intervals: list[Interval], here: list[tuple[Tensor, Tensor]], home: Home | None
) -> Iterator[tuple[Pair, Tensor, Tensor]]:
    """Pairs with keys of another rank that are here, as intervals with their tensors."""
    if home is not None and intervals:
        home.begin(source, intervals, here)
    for pair in keys.plan.pairs_of(keys.rank, source):
        for (lo, hi), tensors in zip(intervals, here, strict=True):
            for first, last in merged([pair.kv], lo, hi):
                k, v = (run_of(x, keys.axis, (first - lo, last - lo)) for x in tensors)
                yield Pair(keys.rank, source, pair.q, (first, last)), k, v


class _Shared:
    """Keys that all ranks need, sent to all at once."""

    def __init__(self, keys: Keys, leaving: Leaving, beside: Beside) -> None:
        self.keys, self.beside = keys, beside
        self.here: list[tuple[int, Interval, tuple[Tensor, Tensor]]] = []
        self.works: list[Any] = []
        beside.under_way.append(self.works)
        if not keys.plan.shared:
            return
        with beside.stream():
            for source, interval in keys.plan.shared:
                k, v = leaving[interval] if source == keys.rank else keys.empty(interval)
                root = dist.get_global_rank(keys.group, source)
                for x in (k, v):
                    self.works.append(dist.broadcast(x, root, group=keys.group, async_op=True))
                self.here.append((source, interval, (k, v)))

    def pairs(self, home: Home | None) -> Iterator[tuple[Pair, Tensor, Tensor]]:
        """What is attended to of them, once they are there."""
        if self.here:
            self.beside.wait(self.works, [x for _, _, tensors in self.here for x in tensors])
        for source in dict.fromkeys(source for source, _, _ in self.here):
            mine = [(interval, tensors) for s, interval, tensors in self.here if s == source]
            intervals = [interval for interval, _ in mine]
            if source != self.keys.rank:
                yield from _pairs_in(self.keys, source, intervals, [tensors for _, tensors in mine], home)
            if home is not None:
                for interval in intervals:
                    home.reduce(source, interval)
                home.open.pop(source, None)


def _gathered_pairs(keys: Keys, beside: Beside, agreed: Callable[[], None], home: Home | None) -> Steps:
    """What a rank needs of all others at once, at its place among the keys of the whole sequence."""
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
            arrived, over = peers.pull(copies)
            works = [arrived]
            beside.at_end.append(over)
    beside.under_way.append(works)
    if home is not None:
        k, v = (x.movedim(0, axis) for x in whole)
        home.gathered, home.peers = (Sum(k.shape, k, axis), Sum(v.shape, v, axis)), peers
    beside.wait()
    for queries, run in calls.first:
        yield Pair(rank, rank, queries, run), *keys.own(run)
    beside.wait(works)
    for queries, run in calls.rest:
        # Whose keys these are is of no matter.
        yield Pair(rank, rank, queries, run), *(run_of(x, 0, run).movedim(0, axis) for x in whole)
    if home is not None:
        home.scatter()
    for queries, run in calls.last:
        yield Pair(rank, rank, queries, run), *keys.own(run)


def _whole(keys: Keys, peers: Peers | None, rank: int) -> list[Tensor]:
    """Room for the keys and values of all ranks, rows first, in a rank's buffer where there are peers."""
    found, offset = [], 0
    for x in (keys.k, keys.v):
        shape = rows_first(x, keys.axis, keys.plan.kv.length)
        found.append(x.new_empty(shape) if peers is None else peers.view(rank, offset, shape, x.dtype))
        offset += aligned(shape, x.dtype)
    return found


def _room(keys: Keys) -> int:
    """The bytes of a buffer in which keys and values lie, and afterwards what a rank adds to others' gradients."""
    shapes = [(rows_first(x, keys.axis, keys.plan.kv.length), x.dtype) for x in (keys.k, keys.v)]
    most = max(homeward(keys, sender)[1] for sender in range(keys.plan.ranks))
    return max(most, sum(aligned(shape, dtype) for shape, dtype in shapes))
