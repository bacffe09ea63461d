"""How keys come to the ranks that need them, and gradients to where the keys are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .planning import Interval, Pair, Plan, merged
from .sums import Gradient, run_of


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
        few = len(self.plan.pairs_of(self.rank, kv_rank)) <= 2
        sums = [(Gradient(k, self.axis, few), Gradient(v, self.axis, few)) for k, v in keys]
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


# --- beside what computes ------------------------


class Beside:
    """Transfers on a stream beside the one that computes, behind what that one had to do when this began."""

    def __init__(self, x: Tensor) -> None:
        self.device = x.device
        self.begun = torch.cuda.current_stream(x.device).record_event() if x.is_cuda else None

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Where tensors of transfers are made, and transfers begin."""
        if self.begun is None:
            yield
            return
        beside = _stream_beside(self.device)
        beside.wait_event(self.begun)
        with torch.cuda.stream(beside):
            yield

    def wait(self, works: list[Any], received: list[Tensor]) -> None:
        """What computes goes on after these, with what they bring."""
        if self.begun is None:
            for work in works:
                work.wait()
            return
        beside, here = _stream_beside(self.device), torch.cuda.current_stream(self.device)
        with torch.cuda.stream(beside):  # whose memory they have: it is not given away before they are over
            for work in works:
                work.wait()
        here.wait_stream(beside)
        for x in received:
            x.record_stream(here)


@functools.cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


# --- steps ------------------------


def steps(
    plan: Plan,
    group: dist.ProcessGroup,
    axis: int,
    k: Tensor,
    v: Tensor,
    agreed: Callable[[], None],
    home: Home | None = None,
) -> Iterator[tuple[Pair, Tensor, Tensor]]:
    """Pairs of this rank with their keys and values: first its own, then those of others.

    Nothing is sent before all have `agreed`, which is heard while this rank is at its own. What a step takes was asked
    for before the step ahead of it, so that it comes while that one computes. `home` gets the gradients of a step as
    soon as it is over.
    """
    rank, ranks = dist.get_rank(group), plan.ranks
    beside = Beside(k)
    for pair in plan.pairs_of(rank, rank):
        rows = plan.kv.rows(rank, *pair.kv)
        yield pair, run_of(k, axis, rows), run_of(v, axis, rows)
    agreed()
    if plan.gathered:
        yield from _gathered_pairs(plan, group, axis, k, v, beside, home)
        return
    shared = _Shared(plan, group, axis, k, v, beside)
    next_step = _Step(plan, group, axis, k, v, beside, 1) if ranks > 1 else None
    yield from shared.pairs(home)
    for number in range(1, ranks):
        step = next_step
        assert step is not None
        next_step = _Step(plan, group, axis, k, v, beside, number + 1) if number + 1 < ranks else None
        yield from step.pairs(home)
        if home is not None:
            home.send(number, k, v)


class _Step:
    """The exchange of keys in one step: to the rank that many behind this one, from the one as many ahead."""

    def __init__(
        self,
        plan: Plan,
        group: dist.ProcessGroup,
        axis: int,
        k: Tensor,
        v: Tensor,
        beside: Beside,
        number: int,
    ) -> None:
        rank, ranks = dist.get_rank(group), plan.ranks
        self.plan, self.axis, self.rank, self.beside = plan, axis, rank, beside
        self.source, target = (rank - number) % ranks, (rank + number) % ranks
        self.intervals = plan.sent(self.source, rank)
        with beside.stream():
            # What is sent must live until it has left.
            self.sent = [
                run_of(x, axis, plan.kv.rows(rank, *interval)).contiguous()
                for interval in plan.sent(rank, target)
                for x in (k, v)
            ]
            self.keys = [tuple(like(x, axis, hi - lo) for x in (k, v)) for lo, hi in self.intervals]
            self.received = [x for pair in self.keys for x in pair]
            self.works = _exchanged(group, target, self.sent, self.source, self.received)

    def pairs(self, home: Home | None) -> Iterator[tuple[Pair, Tensor, Tensor]]:
        """What is attended to of these keys, once they are there."""
        self.beside.wait(self.works, self.received)
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

    def __init__(
        self, plan: Plan, group: dist.ProcessGroup, axis: int, k: Tensor, v: Tensor, beside: Beside
    ) -> None:
        self.plan, self.axis, self.rank, self.beside = plan, axis, dist.get_rank(group), beside
        self.here, self.works = [], []
        with beside.stream():
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
        self.beside.wait(self.works, [x for _, _, keys in self.here for x in keys])
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


def _gathered_pairs(
    plan: Plan, group: dist.ProcessGroup, axis: int, k: Tensor, v: Tensor, beside: Beside, home: Home | None
) -> Iterator[tuple[Pair, Tensor, Tensor]]:
    """All keys at once: one call for a run of queries and a run of keys of others, whoever has them."""
    rank, ranks = dist.get_rank(group), plan.ranks
    local = [plan.kv.local(other) for other in range(ranks)]
    with beside.stream():
        parts = [gathered(group, axis, x, local) for x in (k, v)]
    beside.wait([work for _, work in parts], [x for there, _ in parts for x in there])
    whole = []
    for there, _ in parts:
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


def like(x: Tensor, axis: int, length: int) -> Tensor:
    shape = [*x.shape]
    shape[axis] = length
    return x.new_empty(shape)
