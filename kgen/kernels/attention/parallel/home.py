"""How gradients of keys come to the rank that has these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .peers import Peers, aligned
from .planning import Pair
from .sharding import Interval
from .sums import Sum, run_of
from .transfers import Keys, empty_rows_first, exchanged, like, rows_first


class Home:
    """Brings dk and dv to the rank that has the keys: a part as its kernel stored it, a sum of several in float32, so
    that it is rounded where the keys are alone."""

    def __init__(self, keys: Keys, own: tuple[Sum, Sum]) -> None:
        self.keys, self.own = keys, own
        self.plan, self.group, self.axis, self.rank = keys.plan, keys.group, keys.axis, keys.rank
        self.open: dict[int, tuple[list[Interval], list[tuple[Sum, Sum]]]] = {}
        self.coming: list[tuple[list[Any], list[Tensor], list[tuple[Interval, Tensor, Tensor]]]] = []
        self.gathered: tuple[Sum, Sum] | None = None
        self.peers: Peers | None = None

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
        works = exchanged(self.group, [(source, x) for x in sent], received)
        self.settle()
        # What is sent must live until it has left.
        self.coming.append((works, sent, coming))

    def scatter(self) -> None:
        """What was added to keys that were gathered goes home."""
        assert self.gathered is not None
        axis, (sums, self.gathered) = self.axis, (self.gathered, None)
        coming = [
            (other, interval, self._room(other, interval, empty_rows_first))
            for other in self.keys.others
            for interval in self.plan.sent(self.rank, other)
        ]
        sent: list[tuple[int, Tensor]] = []
        if self.peers is not None:
            works: list[Any] = self._pulled(self.peers, sums, coming)
        else:
            for other in self.keys.others:
                for interval in self.plan.sent(other, self.rank):
                    wide = self.plan.several(self.rank, interval)
                    sent += [(other, _run(total, axis, interval, wide)) for total in sums]
            received = [(other, x) for other, _, pair in coming for x in pair]
            works = exchanged(self.group, sent, received)
        for run in self.plan.kv.parts[self.rank]:
            for own, total in zip(self.own, sums, strict=True):
                for interval, part in total.parts(run):
                    own.add(self.plan.kv.rows(self.rank, *interval), part)
        arrived = [(interval, *(x.movedim(0, axis) for x in pair)) for _, interval, pair in coming]
        self.coming.append((works, [x for _, x in sent], arrived))

    def _pulled(
        self, peers: Peers, sums: tuple[Sum, Sum], coming: list[tuple[int, Interval, list[Tensor]]]
    ) -> list[Any]:
        """What others added to keys of this rank, on its way here from where they leave it."""
        peers.free()
        laid, _ = homeward(self.keys, self.rank)
        for (_, interval, i), (offset, dtype) in laid.items():
            shape = rows_first(sums[i].like, self.axis, interval[1] - interval[0])
            left = peers.view(self.rank, offset, shape, dtype)
            sums[i].write(interval, left.movedim(0, self.axis))
        copies = []
        for other, interval, pair in coming:
            there, _ = homeward(self.keys, other)
            for i, x in enumerate(pair):
                offset, dtype = there[self.rank, interval, i]
                copies.append((x, peers.view(other, offset, x.shape, dtype)))
        return [*peers.pull(copies)]

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


def _run(total: Sum, axis: int, interval: Interval, wide: bool) -> Tensor:
    """The sum of a run, each row in one piece: a part that is alone may be so. A `wide` one is in float32."""
    alone = None if wide else total.alone(interval)
    if alone is not None and alone.movedim(axis, 0).is_contiguous():
        return alone.movedim(axis, 0)
    length = interval[1] - interval[0]
    found = empty_rows_first(total.like, axis, length, torch.float32 if wide else None)
    total.write(interval, found.movedim(0, axis))
    return found


def homeward(keys: Keys, sender: int) -> tuple[dict[tuple[int, Interval, int], tuple[int, torch.dtype]], int]:
    """Where a rank leaves gradients of others' keys in its buffer: by the rank that has a run of them, that run, and 0
    for dk or 1 for dv a byte and a dtype; and the bytes of all."""
    found, end = {}, 0
    for other in range(keys.plan.ranks):
        for interval in keys.plan.sent(other, sender):
            wide = keys.plan.several(sender, interval)
            for i, x in enumerate((keys.k, keys.v)):
                dtype = torch.float32 if wide else x.dtype
                found[other, interval, i] = end, dtype
                end += aligned(rows_first(x, keys.axis, interval[1] - interval[0]), dtype)
    return found, end
