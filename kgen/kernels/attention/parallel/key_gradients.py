"""Transfers of gradients to the rank that owns the keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .partial_sums import Sum, run_of
from .peer_memory import Peers, aligned
from .planning import Pair
from .sharding import Interval
from .transfers import Keys, empty_rows_first, exchanged, kept_with_plan, like, over, rows_first


class KeyGradients:
    """Transfers of dk and dv to the ranks that own the keys.

    A single part travels as its kernel stored it. A sum of several travels in float32, and the
    owner rounds it.
    """

    def __init__(self, keys: Keys, own: tuple[Sum, Sum]) -> None:
        self.keys, self.own = keys, own
        self.plan, self.group, self.axis, self.rank = keys.plan, keys.group, keys.axis, keys.rank
        self.open: dict[int, tuple[list[Interval], list[tuple[Sum, Sum]]]] = {}
        self.coming: list[
            tuple[list[Any], list[Tensor], list[tuple[Interval, Tensor, Tensor]]]
        ] = []
        self.gathered: tuple[Sum, Sum] | None = None
        self.peers: Peers | None = None
        self.laid: dict[int, Laid] = {}
        self.over: list[Any] = []
        """Works to wait for at the end."""

    def begin(
        self, kv_rank: int, intervals: list[Interval], keys: list[tuple[Tensor, Tensor]]
    ) -> None:
        """Prepare sums for the gradients of another rank's keys."""
        sums = [(Sum(k.shape, k, self.axis), Sum(v.shape, v, self.axis)) for k, v in keys]
        self.open[kv_rank] = intervals, sums

    def add(self, pair: Pair, dk: Tensor, dv: Tensor) -> None:
        """Add the gradients of a pair."""
        if self.gathered is not None:
            at, sums = pair.kv, self.gathered
        elif pair.kv_rank == self.rank:
            at, sums = self.plan.kv.rows(self.rank, *pair.kv), self.own
        else:
            intervals, all_sums = self.open[pair.kv_rank]
            found = next(
                i for i, (lo, hi) in enumerate(intervals) if lo <= pair.kv[0] and pair.kv[1] <= hi
            )
            at, sums = (
                (pair.kv[0] - intervals[found][0], pair.kv[1] - intervals[found][0]),
                all_sums[found],
            )
        for total, gradient in zip(sums, (dk, dv), strict=True):
            total.add(at, gradient)

    def _room(self, q_rank: int, interval: Interval, empty: Callable[..., Tensor]) -> list[Tensor]:
        """Return tensors for the gradients of own keys that another rank sends."""
        length, wide = interval[1] - interval[0], self.plan.several(q_rank, interval)
        return [
            empty(total.like, self.axis, length, torch.float32 if wide else None)
            for total in self.own
        ]

    def read(self, peers: Peers, end: Callable[[int], int]) -> None:
        """Transfer gradients in peer memory: each rank reads the gradients of its keys from the
        others' buffers.

        `end(rank)` is the offset, in bytes, at which gradients begin in the buffer of a rank.
        """
        self.peers = peers
        self.laid = {
            rank: homeward(self.keys, rank, end(rank))[0] for rank in range(self.plan.ranks)
        }

    def send(self, step: int) -> list[Any]:
        """Start transfers of a step's gradients: to the owner of its keys, and of own keys to this
        rank.

        In peer memory, only write the gradients into the buffer, and return no works.
        """
        ranks = self.plan.ranks
        source, target = (self.rank - step) % ranks, (self.rank + step) % ranks
        found = [*zip(*self.open.pop(source, ([], [])), strict=True)]
        if self.peers is not None:
            for interval, sums in found:
                self._leave(source, interval, (0, interval[1] - interval[0]), sums)
            return []
        sent = []
        for interval, sums in found:
            wide = self.plan.several(self.rank, interval)
            sent += [total.wide() if wide else total.result().contiguous() for total in sums]
        coming = [
            (interval, *self._room(target, interval, like))
            for interval in self.plan.sent(self.rank, target)
        ]
        received = [(target, x) for _, *pair in coming for x in pair]
        works = exchanged(self.group, [(source, x) for x in sent], received)
        self.settle()
        # The tensors of `sent` must live until they are sent.
        self.coming.append((works, sent, coming))
        return works

    def scatter(self) -> list[Any]:
        """Start transfers of the gradients of gathered keys to their owners, and return the
        works.
        """
        assert self.gathered is not None
        axis, (sums, self.gathered) = self.axis, (self.gathered, None)
        if self.peers is not None:
            self.peers.free()
            for owner in self.keys.others:
                for interval in self.plan.sent(owner, self.rank):
                    self._leave(owner, interval, interval, sums)
            works = self.collect()
        else:
            sent: list[tuple[int, Tensor]] = []
            for owner in self.keys.others:
                for interval in self.plan.sent(owner, self.rank):
                    wide = self.plan.several(self.rank, interval)
                    sent += [(owner, _run(total, axis, interval, wide)) for total in sums]
            coming = self._rooms()
            works = exchanged(
                self.group, sent, [(other, x) for other, _, pair in coming for x in pair]
            )
            self._expect(works, [x for _, x in sent], coming)
        for run in self.plan.kv.parts[self.rank]:
            for own, total in zip(self.own, sums, strict=True):
                for interval, part in total.parts(run):
                    own.add(self.plan.kv.rows(self.rank, *interval), part)
        return works

    def collect(self) -> list[Any]:
        """Start copies of the gradients of own keys from the others' buffers, and return the
        works.
        """
        assert self.peers is not None
        copies, coming = [], self._rooms()
        for other, interval, pair in coming:
            for i, x in enumerate(pair):
                offset, dtype = self.laid[other][self.rank, interval, i]
                copies.append((x, self.peers.view(other, offset, x.shape, dtype)))
        self.peers.open()
        works: list[Any] = [self.peers.copy(copies)]
        self.over.append(self.peers.close())
        self._expect(works, [], coming)
        return works

    def _leave(self, owner: int, interval: Interval, rows: Interval, sums: tuple[Sum, Sum]) -> None:
        """Write the gradients of a run of another rank's keys to this rank's buffer."""
        assert self.peers is not None
        for i, total in enumerate(sums):
            offset, dtype = self.laid[self.rank][owner, interval, i]
            shape = rows_first(total.like, self.axis, interval[1] - interval[0])
            total.write(
                rows, self.peers.view(self.rank, offset, shape, dtype).movedim(0, self.axis)
            )

    def _rooms(self) -> list[tuple[int, Interval, list[Tensor]]]:
        """Return tensors for the gradients of own keys, rows first, by rank and run."""
        return [
            (other, interval, self._room(other, interval, empty_rows_first))
            for other in self.keys.others
            for interval in self.plan.sent(self.rank, other)
        ]

    def _expect(
        self, works: list[Any], sent: list[Tensor], coming: list[tuple[int, Interval, list[Tensor]]]
    ) -> None:
        arrived = [(run, *(x.movedim(0, self.axis) for x in pair)) for _, run, pair in coming]
        self.coming.append((works, sent, arrived))

    def wait(self) -> None:
        """Wait until all gradients have arrived."""
        for works, _, _ in self.coming:
            over(works)

    def end(self) -> None:
        """Add the last gradients, and wait for all transfers."""
        self.settle()
        over(self.over)

    def settle(self) -> None:
        """Wait for gradients of own keys, and add them."""
        self.wait()
        for _, _, gradients in self.coming:
            for interval, dk, dv in gradients:
                self.add(Pair(self.rank, self.rank, interval, interval), dk, dv)
        self.coming.clear()

    def reduce(self, kv_rank: int, interval: Interval) -> None:
        """Sum the gradients of shared keys over all ranks, at their owner."""
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
    """Return the sum of a run, rows first and contiguous, in float32 if `wide`.

    Do not copy a single part.
    """
    alone = None if wide else total.alone(interval)
    if alone is not None and alone.movedim(axis, 0).is_contiguous():
        return alone.movedim(axis, 0)
    length = interval[1] - interval[0]
    found = empty_rows_first(total.like, axis, length, torch.float32 if wide else None)
    total.write(interval, found.movedim(0, axis))
    return found


Laid = dict[tuple[int, Interval, int], tuple[int, torch.dtype]]
"""Offset in bytes and dtype in a buffer. Keys are the owner, the run, and 0 for dk or 1 for dv."""


@kept_with_plan
def homeward(keys: Keys, sender: int, end: int = 0) -> tuple[Laid, int]:
    """Return the layout of gradients of others' keys in a rank's buffer, from the offset `end` on,
    and its end.
    """
    found = {}
    for other in range(keys.plan.ranks):
        for interval in keys.plan.sent(other, sender):
            wide = keys.plan.several(sender, interval)
            for i, x in enumerate((keys.k, keys.v)):
                dtype = torch.float32 if wide else x.dtype
                found[other, interval, i] = end, dtype
                end += aligned(rows_first(x, keys.axis, interval[1] - interval[0]), dtype)
    return found, end
