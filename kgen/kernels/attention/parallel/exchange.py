"""How keys come to the ranks that need them, and gradients to where the keys are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .planning import Interval, Pair, Plan, merged


class Gradient:
    """A sum of gradients of runs of rows, in float32 where there is more than one."""

    def __init__(self, like: Tensor, axis: int) -> None:
        self.like, self.axis = like, axis
        self.sum: Tensor | None = None

    def add(self, rows: Interval, gradient: Tensor) -> None:
        """Of some rows."""
        if self.sum is None and rows == (0, self.like.shape[self.axis]):
            self.sum = gradient
            return
        if self.sum is None:
            self.sum = torch.zeros_like(self.like, dtype=torch.float32)
        elif self.sum.dtype != torch.float32:
            self.sum = self.sum.float()
        run_of(self.sum, self.axis, rows).add_(gradient)

    def result(self) -> Tensor:
        """Of all rows, in the dtype of what it is the gradient of."""
        return torch.zeros_like(self.like) if self.sum is None else self.sum.to(self.like.dtype)


class Home:
    """Brings dk and dv to the rank that has the keys."""

    def __init__(
        self, plan: Plan, group: dist.ProcessGroup, axis: int, own: tuple[Gradient, Gradient]
    ) -> None:
        self.plan, self.group, self.axis, self.own = plan, group, axis, own
        self.rank = dist.get_rank(group)
        self.open: dict[int, tuple[list[Interval], list[tuple[Gradient, Gradient]]]] = {}
        self.coming: list[tuple[list[Any], list[Tensor], list[tuple[Interval, Tensor, Tensor]]]] = []

    def begin(self, kv_rank: int, intervals: list[Interval], keys: list[tuple[Tensor, Tensor]]) -> None:
        """Gradients of another's keys are going to be added."""
        sums = [(Gradient(k, self.axis), Gradient(v, self.axis)) for k, v in keys]
        self.open[kv_rank] = intervals, sums

    def add(self, pair: Pair, dk: Tensor, dv: Tensor) -> None:
        """Of a pair."""
        if pair.kv_rank == self.rank:
            at, sums = self.plan.kv.rows(self.rank, *pair.kv), self.own
        else:
            intervals, all_sums = self.open[pair.kv_rank]
            found = next(i for i, (lo, hi) in enumerate(intervals) if lo <= pair.kv[0] and pair.kv[1] <= hi)
            at, sums = (pair.kv[0] - intervals[found][0], pair.kv[1] - intervals[found][0]), all_sums[found]
        for total, gradient in zip(sums, (dk, dv), strict=True):
            total.add(at, gradient)

    def send(self, step: int, k: Tensor, v: Tensor) -> None:
        """What was added in a step goes home; what others added to keys of this rank is on its way here."""
        ranks = self.plan.ranks
        source, target = (self.rank - step) % ranks, (self.rank + step) % ranks
        _, sums = self.open.pop(source, ([], []))
        sent = [total.result().contiguous() for pair in sums for total in pair]
        coming = [
            (interval, *(like(x, self.axis, interval[1] - interval[0]) for x in (k, v)))
            for interval in self.plan.sent(self.rank, target)
        ]
        works = _exchanged(self.group, source, sent, target, [x for _, *pair in coming for x in pair])
        self.settle()
        # What is sent must live until it has left.
        self.coming.append((works, sent, coming))

    def settle(self) -> None:
        """Add what has come."""
        for works, _, gradients in self.coming:
            for work in works:
                work.wait()
            for interval, dk, dv in gradients:
                self.add(Pair(self.rank, self.rank, interval, interval), dk, dv)
        self.coming.clear()

    def reduce(self, kv_rank: int, interval: Interval) -> None:
        """Keys that all have: the sum of what all ranks added, at the rank that has them."""
        if kv_rank == self.rank:
            length = interval[1] - interval[0]
            k, v = (run_of(total.like, self.axis, (0, length)) for total in self.own)
            sums = Gradient(k, self.axis), Gradient(v, self.axis)
        else:
            intervals, all_sums = self.open[kv_rank]
            sums = all_sums[intervals.index(interval)]
        for i, total in enumerate(sums):
            summed = total.result().float().contiguous()
            dist.reduce(summed, dist.get_global_rank(self.group, kv_rank), group=self.group)
            if kv_rank == self.rank:
                self.own[i].add(self.plan.kv.rows(self.rank, *interval), summed)


# --- steps ------------------------


def steps(
    plan: Plan, group: dist.ProcessGroup, axis: int, k: Tensor, v: Tensor, home: Home | None = None
) -> Iterator[tuple[Pair, Tensor, Tensor]]:
    """Pairs of this rank with their keys and values: first its own, then those of others.

    What a step takes was asked for before the step ahead of it, so that it comes while that one computes. `home` gets
    the gradients of a step as soon as it is over.
    """
    rank, ranks = dist.get_rank(group), plan.ranks
    if plan.gathered:
        yield from _gathered_steps(plan, group, axis, k, v, home)
        return
    shared = _Shared(plan, group, axis, k, v)
    next_step = _Step(plan, group, axis, k, v, 1) if ranks > 1 else None
    for pair in plan.pairs_of(rank, rank):
        rows = plan.kv.rows(rank, *pair.kv)
        yield pair, run_of(k, axis, rows), run_of(v, axis, rows)
    yield from shared.pairs(home)
    for number in range(1, ranks):
        step = next_step
        assert step is not None
        next_step = _Step(plan, group, axis, k, v, number + 1) if number + 1 < ranks else None
        yield from step.pairs(home)
        if home is not None:
            home.send(number, k, v)


class _Step:
    """The exchange of keys in one step: to the rank that many behind this one, from the one as many ahead."""

    def __init__(
        self, plan: Plan, group: dist.ProcessGroup, axis: int, k: Tensor, v: Tensor, number: int
    ) -> None:
        rank, ranks = dist.get_rank(group), plan.ranks
        self.plan, self.axis, self.rank = plan, axis, rank
        self.source, target = (rank - number) % ranks, (rank + number) % ranks
        sent = []
        for interval in plan.sent(rank, target):
            rows = plan.kv.rows(rank, *interval)
            sent += [run_of(x, axis, rows).contiguous() for x in (k, v)]
        self.intervals = plan.sent(self.source, rank)
        self.keys = [tuple(like(x, axis, hi - lo) for x in (k, v)) for lo, hi in self.intervals]
        # What is sent must live until it has left.
        self.sent = sent
        self.works = _exchanged(group, target, sent, self.source, [x for pair in self.keys for x in pair])

    def pairs(self, home: Home | None) -> Iterator[tuple[Pair, Tensor, Tensor]]:
        """What is attended to of these keys, once they are there."""
        for work in self.works:
            work.wait()
        yield from _pairs_in(self.plan, self.axis, self.rank, self.source, self.intervals, self.keys, home)


def _pairs_in(
    plan: Plan, axis: int, rank: int, source: int, intervals: list[Interval], keys: Any, home: Home | None
) -> Iterator[tuple[Pair, Tensor, Tensor]]:
    """Pairs with keys of another rank that are here, as intervals with their tensors."""
    if home is not None and intervals:
        home.begin(source, intervals, keys)
    for pair in plan.pairs_of(rank, source):
        for (lo, hi), (k, v) in zip(intervals, keys, strict=True):
            for first, last in merged([pair.kv], lo, hi):
                rows = first - lo, last - lo
                yield Pair(rank, source, pair.q, (first, last)), run_of(k, axis, rows), run_of(v, axis, rows)


class _Shared:
    """Keys that all ranks need, sent to all at once."""

    def __init__(self, plan: Plan, group: dist.ProcessGroup, axis: int, k: Tensor, v: Tensor) -> None:
        self.plan, self.axis, self.rank = plan, axis, dist.get_rank(group)
        self.here, self.works = [], []
        for source, (lo, hi) in plan.shared:
            if source == self.rank:
                rows = plan.kv.rows(source, lo, hi)
                keys = tuple(run_of(x, axis, rows).contiguous() for x in (k, v))
            else:
                keys = tuple(like(x, axis, hi - lo) for x in (k, v))
            for x in keys:
                root = dist.get_global_rank(group, source)
                self.works.append(dist.broadcast(x, root, group=group, async_op=True))
            self.here.append((source, (lo, hi), keys))

    def pairs(self, home: Home | None) -> Iterator[tuple[Pair, Tensor, Tensor]]:
        """What is attended to of them, once they are there."""
        for work in self.works:
            work.wait()
        for source in dict.fromkeys(source for source, _, _ in self.here):
            mine = [(interval, keys) for s, interval, keys in self.here if s == source]
            intervals = [interval for interval, _ in mine]
            if source != self.rank:
                yield from _pairs_in(
                    self.plan, self.axis, self.rank, source, intervals, [keys for _, keys in mine], home
                )
            if home is not None:
                for interval in intervals:
                    home.reduce(source, interval)
                home.open.pop(source, None)


def _gathered_steps(
    plan: Plan, group: dist.ProcessGroup, axis: int, k: Tensor, v: Tensor, home: Home | None
) -> Iterator[tuple[Pair, Tensor, Tensor]]:
    """All keys at once: one call for a run of queries and a run of keys, whoever has them."""
    rank, ranks = dist.get_rank(group), plan.ranks
    local = [plan.kv.local(other) for other in range(ranks)]
    parts = [gathered(group, axis, x, local) for x in (k, v)]
    for pair in plan.pairs_of(rank, rank):
        rows = plan.kv.rows(rank, *pair.kv)
        yield pair, run_of(k, axis, rows), run_of(v, axis, rows)
    whole = []
    for there, work in parts:
        if work is not None:
            work.wait()
        pieces = {
            own: run_of(there[other], axis, plan.kv.rows(other, *own))
            for other in range(ranks)
            for own in plan.kv.parts[other]
        }
        whole.append(torch.cat([pieces[own] for own in sorted(pieces)], axis))
    everything = (0, plan.kv.length)
    sums = Gradient(whole[0], axis), Gradient(whole[1], axis)
    if home is not None:
        for other in range(ranks):
            if other != rank:
                home.open[other] = [everything], [sums]
    for run in plan.q.parts[rank]:
        needed = [
            (p.q, p.kv) for other in range(ranks) if other != rank for p in plan.pairs_of(rank, other)
            if run[0] <= p.q[0] and p.q[1] <= run[1]
        ]  # fmt: skip
        for keys in merged(kv for _, kv in needed):
            seen = [q for q, kv in needed if keys[0] <= kv[0] and kv[1] <= keys[1]]
            queries = min(lo for lo, _ in seen), max(hi for _, hi in seen)
            other = next(o for o in range(ranks) if o != rank)
            yield Pair(rank, other, queries, keys), run_of(whole[0], axis, keys), run_of(whole[1], axis, keys)
    if home is None:
        return
    for i, total in enumerate(sums):
        summed = total.result().float().contiguous()
        dist.all_reduce(summed, group=group)
        for own in plan.kv.parts[rank]:
            home.own[i].add(plan.kv.rows(rank, *own), run_of(summed, axis, own))


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
    group: dist.ProcessGroup, target: int, sent: list[Tensor], source: int, received: list[Tensor]
) -> list[Any]:
    """Tensors on their way to one rank, and from one."""
    to, come = dist.get_global_rank(group, target), dist.get_global_rank(group, source)
    ops = [dist.P2POp(dist.isend, x, to, group) for x in sent if x.numel()]
    ops += [dist.P2POp(dist.irecv, x, come, group) for x in received if x.numel()]
    works: list[Any] = dist.batch_isend_irecv(ops) if ops else []
    return works


def run_of(x: Tensor, axis: int, rows: Interval) -> Tensor:
    """Some rows of a tensor, as a view."""
    return x.narrow(axis, rows[0], rows[1] - rows[0])


def like(x: Tensor, axis: int, length: int) -> Tensor:
    shape = [*x.shape]
    shape[axis] = length
    return x.new_empty(shape)
