"""The positions of a sequence that each rank has: intervals `(lo, hi)` without `hi`."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

Interval = tuple[int, int]
TILE = 128
"""Positions by which work is counted: what kernels visit at a time."""


@dataclass(frozen=True)
class Sharding:
    """The positions of each rank: intervals, in the order in which their rows lie in the rank's tensors."""

    parts: tuple[tuple[Interval, ...], ...]

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.parts)

    @property
    def length(self) -> int:
        """Of the whole sequence."""
        return sum(hi - lo for part in self.parts for lo, hi in part)

    def local(self, rank: int) -> int:
        """The number of positions of a rank."""
        return sum(hi - lo for lo, hi in self.parts[rank])

    @cached_property
    def joined(self) -> Sharding:
        """The same with neighbours as one."""
        return Sharding(tuple(tuple(merged(part)) for part in self.parts))

    def rows(self, rank: int, lo: int, hi: int) -> Interval:
        """Where positions that a rank has side by side are in its tensors. Raises `ValueError` for others."""
        first = 0
        for own_lo, own_hi in self.joined.parts[rank]:
            if own_lo <= lo and hi <= own_hi:
                return first + lo - own_lo, first + hi - own_lo
            first += own_hi - own_lo
        raise ValueError(f"rank {rank} has no positions [{lo}, {hi}) in one piece")


def cut(length: int, pieces: int) -> list[Interval]:
    """A sequence in pieces that follow each other, none longer than another by more than one position."""
    ends = [length * i // pieces for i in range(pieces + 1)]
    return list(pairwise(ends))


def contiguous(length: int, ranks: int) -> Sharding:
    """A run of positions for each rank, as long as `torch.chunk` makes them, and `Shard` of DTensors."""
    most = -(-length // ranks)
    ends = [min(rank * most, length) for rank in range(ranks + 1)]
    return Sharding(tuple((piece,) if piece[0] < piece[1] else () for piece in pairwise(ends)))


def runs(lengths: Sequence[int]) -> Sharding:
    """A run of positions for each rank, of these lengths."""
    found, end = [], 0
    for length in lengths:
        found.append(((end, end + length),) if length else ())
        end += length
    return Sharding(tuple(found))


def head_tail(length: int, ranks: int) -> Sharding:
    """Two runs for each rank, as far from the start as from the end: of a causal mask, all have equal work."""
    pieces = cut(length, 2 * ranks)
    ends = [(pieces[r], pieces[-1 - r]) for r in range(ranks)]
    return Sharding(tuple(tuple((lo, hi) for lo, hi in two if lo < hi) for two in ends))


def by_cost(length: int, ranks: int, cost: Callable[[int, int], int], runs_each: int = 2) -> Sharding:
    """The same number of runs for each rank. The most expensive remaining run goes to the rank with the least work."""
    pieces = cut(length, runs_each * ranks)
    costs = {piece: cost(*piece) for piece in pieces}
    free = [(0, rank) for rank in range(ranks)]
    own: list[list[Interval]] = [[] for _ in range(ranks)]
    for piece in sorted(pieces, key=lambda piece: (-costs[piece], piece)):
        spent, rank = heapq.heappop(free)
        own[rank].append(piece)
        if len(own[rank]) < runs_each:
            heapq.heappush(free, (spent + costs[piece], rank))
    return Sharding(tuple(_filled(*sorted(part)) for part in own))


def _filled(*pieces: Interval) -> tuple[Interval, ...]:
    """Those that have positions; neighbours are one."""
    return tuple(merged(pieces))


def merged(intervals: Iterable[Interval], lo: int = 0, hi: int | None = None) -> list[Interval]:
    """The positions of intervals, within bounds, as few intervals as can be, ascending."""
    found: list[Interval] = []
    for first, last in sorted(intervals):
        first, last = max(first, lo), last if hi is None else min(last, hi)
        if first >= last:
            continue
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def without(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """The positions of intervals that are in no other."""
    found = list(intervals)
    for lo, hi in others:
        found = [
            piece for a, b in found for piece in ((a, min(b, lo)), (max(a, hi), b)) if piece[0] < piece[1]
        ]
    return found
