"""How keys come to the ranks that need them, and gradients to where the keys are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .planning import Pair, Plan
from .sharding import Interval, merged
from .sums import Sum, copied, run_of


@dataclass(frozen=True)
class Keys:
    """Keys and values of this rank, with their sequence along `axis`, and where others are."""

    plan: Plan
    group: dist.ProcessGroup
    axis: int
    k: Tensor
    v: Tensor

    @functools.cached_property
    def rank(self) -> int:
        """Of this process."""
        rank: int = dist.get_rank(self.group)
        return rank

    @property
    def others(self) -> list[int]:
        """All ranks but this."""
        return [other for other in range(self.plan.ranks) if other != self.rank]

    def own(self, interval: Interval) -> tuple[Tensor, Tensor]:
        """A run of positions that this rank has."""
        rows = self.plan.kv.rows(self.rank, *interval)
        return run_of(self.k, self.axis, rows), run_of(self.v, self.axis, rows)

    def empty(self, interval: Interval) -> tuple[Tensor, Tensor]:
        """Room for a run that another rank has."""
        length = interval[1] - interval[0]
        return like(self.k, self.axis, length), like(self.v, self.axis, length)


class Home:
    """Brings dk and dv to the rank that has the keys: a part as its kernel stored it, a sum of several in float32, so
    that it is rounded where the keys are alone."""

    def __init__(self, keys: Keys, own: tuple[Sum, Sum]) -> None:
        self.keys, self.own = keys, own
        self.plan, self.group, self.axis, self.rank = keys.plan, keys.group, keys.axis, keys.rank
        self.open: dict[int, tuple[list[Interval], list[tuple[Sum, Sum]]]] = {}
        self.coming: list[tuple[list[Any], list[Tensor], list[tuple[Interval, Tensor, Tensor]]]] = []
        self.gathered: tuple[Sum, Sum] | None = None

    def begin(self, kv_rank: int, intervals: list[Interval], keys: list[tuple[Tensor, Tensor]]) -> None:
        """Gradients of another's keys are going to be added."""
        sums = [(Sum(k.shape, k, self.axis), Sum(v.shape, v, self.axis)) for k, v in keys]
        self.open[kv_rank] = intervals, sums

    def add(self, pair: Pair, dk: Tensor, dv: Tensor) -> None:
        """Of a pair."""
        if self.gathered is not None:
            at, sums = pair.kv, self.gathered
        elif pair.kv_rank == self.rank:
            at, sums = self.plan.kv.rows(self.rank, *pair.kv), self.own
        else:
            intervals, all_sums = self.open[pair.kv_rank]
            found = next(i for i, (lo, hi) in enumerate(intervals) if lo <= pair.kv[0] and pair.kv[1] <= hi)
            at, sums = (pair.kv[0] - intervals[found][0], pair.kv[1] - intervals[found][0]), all_sums[found]
        for total, gradient in zip(sums, (dk, dv), strict=True):
            total.add(at, gradient)

    def _room(self, q_rank: int, interval: Interval, empty: Callable[..., Tensor]) -> list[Tensor]:
        """For gradients of keys of this rank, as another sends them."""
        length, wide = interval[1] - interval[0], self.plan.several(q_rank, interval)
        return [empty(total.like, self.axis, length, torch.float32 if wide else None) for total in self.own]

    def send(self, step: int) -> None:
        """What was added in a step goes home; what others added to keys of this rank is on its way here."""
        ranks = self.plan.ranks
        source, target = (self.rank - step) % ranks, (self.rank + step) % ranks
        sent = []
        for interval, sums in zip(*self.open.pop(source, ([], [])), strict=True):
            wide = self.plan.several(self.rank, interval)
            sent += [total.wide() if wide else total.result().contiguous() for total in sums]
        coming = [
            (interval, *self._room(target, interval, like)) for interval in self.plan.sent(self.rank, target)
        ]
        received = [(target, x) for _, *pair in coming for x in pair]
        works = _exchanged(self.group, [(source, x) for x in sent], received)
        self.settle()
        # What is sent must live until it has left.
        self.coming.append((works, sent, coming))

    def scatter(self) -> None:
        """What was added to keys that were gathered goes home."""
        assert self.gathered is not None
        axis, (sums, self.gathered) = self.axis, (self.gathered, None)
        others = self.keys.others
        sent = []
        for other in others:
            for interval in self.plan.sent(other, self.rank):
                wide = self.plan.several(self.rank, interval)
                sent += [(other, _rows_first(total, axis, interval, wide)) for total in sums]
        coming = [
            (other, interval, self._room(other, interval, empty_rows_first))
            for other in others
            for interval in self.plan.sent(self.rank, other)
        ]
        received = [(other, x) for other, _, pair in coming for x in pair]
        works = _exchanged(self.group, sent, received)
        for run in self.plan.kv.parts[self.rank]:
            for own, total in zip(self.own, sums, strict=True):
                for interval, part in total.parts(run):
                    own.add(self.plan.kv.rows(self.rank, *interval), part)
        arrived = [(interval, *(x.movedim(0, axis) for x in pair)) for _, interval, pair in coming]
        self.coming.append((works, [x for _, x in sent], arrived))

    def wait(self) -> None:
        """Until all that is under way has come."""
        for works, _, _ in self.coming:
            for work in works:
                work.wait()

    def settle(self) -> None:
        """Add what has come."""
        self.wait()
        for _, _, gradients in self.coming:
            for interval, dk, dv in gradients:
                self.add(Pair(self.rank, self.rank, interval, interval), dk, dv)
        self.coming.clear()

    def reduce(self, kv_rank: int, interval: Interval) -> None:
        """Keys that all have: the sum of what all ranks added, at the rank that has them."""
        if kv_rank == self.rank:
            length = interval[1] - interval[0]
            k, v = (run_of(total.like, self.axis, (0, length)) for total in self.own)
            sums = Sum(k.shape, k, self.axis), Sum(v.shape, v, self.axis)
        else:
            intervals, all_sums = self.open[kv_rank]
            sums = all_sums[intervals.index(interval)]
        for i, total in enumerate(sums):
            summed = total.wide()
            dist.reduce(summed, dist.get_global_rank(self.group, kv_rank), group=self.group)
            if kv_rank == self.rank:
                self.own[i].add(self.plan.kv.rows(self.rank, *interval), summed)


# --- beside what computes ------------------------

LEAD = 20_000
"""Cycles: some ten microseconds, in which a kernel of NCCL is there."""


class Beside:
    """Transfers on a stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.under_way: list[list[Any]] = []
        self.here: torch.cuda.Stream | None = None
        self.beside: torch.cuda.Stream | None = None

    def begin(self) -> None:
        """What follows is behind what the stream that computes had to do until here."""
        if self.device.type == "cuda":
            self.here, self.beside = torch.cuda.current_stream(self.device.index), _stream_beside(self.device)
            self.beside.wait_stream(self.here)

    def stream(self) -> AbstractContextManager[object]:
        """Where tensors of transfers are made, and transfers begin."""
        return nullcontext() if self.beside is None else torch.cuda.stream(self.beside)

    def wait(self, works: list[Any] | None = None, received: Sequence[Tensor] = ()) -> None:
        """What computes goes on after these, with what they bring; and a moment after what is under way besides can
        begin: a kernel that has all of a GPU leaves nothing to a transfer that became ready with it, until it is over.
        """
        if self.here is None or self.beside is None:
            _wait(works or [])
            return
        if not any(self.under_way):
            return
        with self.stream():  # whose memory they have: it is not given away before they are over
            _wait(works or [])
            if any(self.under_way):
                torch.cuda._sleep(LEAD)
        self.here.wait_stream(self.beside)
        for x in received:
            x.record_stream(self.here)

    def end(self) -> None:
        """Nothing is under way any more."""
        for works in self.under_way:
            _wait(works)


def _wait(works: list[Any]) -> None:
    """What is over is not waited for again."""
    for work in works:
        work.wait()
    works.clear()


@functools.cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


# --- steps ------------------------


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
            self.works = _exchanged(keys.group, sent, [(self.source, x) for x in self.received])
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
    whole = [empty_rows_first(x, axis, plan.kv.length) for x in (keys.k, keys.v)]
    used = merged([*(run for _, run in calls.rest), *(interval for _, interval in leaving)])
    for run in (run for part in plan.kv.parts[rank] for run in merged(used, *part)):
        for rows, everything in zip(keys.own(run), whole, strict=True):
            copied(run_of(everything, 0, run).movedim(0, axis), rows)
    agreed()
    beside.begin()
    with beside.stream():
        sent, received = (
            [(other, run_of(x, 0, interval)) for other, interval in which for x in whole]
            for which in (leaving, coming)
        )
        works = _exchanged(keys.group, sent, received)
    beside.under_way.append(works)
    if home is not None:
        k, v = (x.movedim(0, axis) for x in whole)
        home.gathered = Sum(k.shape, k, axis), Sum(v.shape, v, axis)
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


def empty_rows_first(x: Tensor, axis: int, length: int, dtype: torch.dtype | None = None) -> Tensor:
    """So many rows of a tensor like this one, each row in one piece: runs of them travel as they are."""
    shape = [*x.shape]
    del shape[axis]
    return x.new_empty((length, *shape), dtype=dtype)


def _rows_first(total: Sum, axis: int, interval: Interval, wide: bool) -> Tensor:
    """The sum of a run, each row in one piece: a part that is alone may be so. A `wide` one is in float32."""
    alone = None if wide else total.alone(interval)
    if alone is not None and alone.movedim(axis, 0).is_contiguous():
        return alone.movedim(axis, 0)
    length = interval[1] - interval[0]
    found = empty_rows_first(total.like, axis, length, torch.float32 if wide else None)
    total.write(interval, found.movedim(0, axis))
    return found


def gathered(
    group: dist.ProcessGroup, axis: int, x: Tensor, lengths: list[int], async_op: bool = True
) -> tuple[list[Tensor], Any]:
    """The rows of all ranks along an axis, of which each has so many, and the work after which they are there."""
    longest = max(lengths)
    if x.shape[axis] == longest:
        own = x.contiguous()
    else:  # what is gathered has one size
        own = like(x, axis, longest)
        run_of(own, axis, (0, x.shape[axis])).copy_(x)
    there = [like(x, axis, longest) for _ in lengths]
    work = dist.all_gather(there, own, group=group, async_op=async_op)
    return [run_of(one, axis, (0, length)) for one, length in zip(there, lengths, strict=True)], work


def _exchanged(
    group: dist.ProcessGroup, sent: list[tuple[int, Tensor]], received: list[tuple[int, Tensor]]
) -> list[Any]:
    """Tensors on their way to ranks, and from ranks."""
    ops = []
    for do, tensors in ((dist.isend, sent), (dist.irecv, received)):
        for rank, x in tensors:
            if x.numel():
                ops.append(dist.P2POp(do, x, dist.get_global_rank(group, rank), group))
    works: list[Any] = dist.batch_isend_irecv(ops) if ops else []
    return works


def like(x: Tensor, axis: int, length: int, dtype: torch.dtype | None = None) -> Tensor:
    shape = [*x.shape]
    shape[axis] = length
    return x.new_empty(shape, dtype=dtype)
