"""The positions of a sequence that each rank owns, as half-open intervals `(lo, hi)`."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

Interval = tuple[int, int]
TILE = 128
"""Number of positions in a tile of the kernels, in which work is counted."""


@dataclass(frozen=True)
class Sharding:
    """The positions of each rank: intervals, in the order of the rows in the rank's tensors."""

    parts: tuple[tuple[Interval, ...], ...]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.parts)

    @property
    def length(self) -> int:
        """Length of the whole sequence."""
        return sum(hi - lo for part in self.parts for lo, hi in part)

    def local(self, rank: int) -> int:
        """Return the number of positions of a rank."""
        return sum(hi - lo for lo, hi in self.parts[rank])

    @cached_property
    def joined(self) -> Sharding:
        """The same positions, with adjacent intervals joined."""
        return Sharding(tuple(tuple(merged(part)) for part in self.parts))

    def rows(self, rank: int, lo: int, hi: int) -> Interval:
        """Return the rows `(first, end)` of the positions `[lo, hi)` in the tensors of a rank.

        Raises `ValueError` if the rank does not own them in one run.
        """
        first = 0
        for own_lo, own_hi in self.joined.parts[rank]:
            if own_lo <= lo and hi <= own_hi:
                return first + lo - own_lo, first + hi - own_lo
            first += own_hi - own_lo
        raise ValueError(
            f"positions [{lo}, {hi}) are not one run of rank {rank}, which has "
            f"{self.joined.parts[rank]}"
        )


def cut(length: int, pieces: int) -> list[Interval]:
    """Cut a sequence into consecutive pieces whose lengths differ by at most one."""
    ends = [length * i // pieces for i in range(pieces + 1)]
    return list(pairwise(ends))


def contiguous(length: int, ranks: int) -> Sharding:
    """Return one run of positions per rank, with the lengths of `torch.chunk` and of a DTensor's
    `Shard`.
    """
    most = -(-length // ranks)
    ends = [min(rank * most, length) for rank in range(ranks + 1)]
    return Sharding(tuple((piece,) if piece[0] < piece[1] else () for piece in pairwise(ends)))


def runs(lengths: Sequence[int]) -> Sharding:
    """Return one run of positions per rank, with these lengths."""
    found, end = [], 0
    for length in lengths:
        found.append(((end, end + length),) if length else ())
        end += length
    return Sharding(tuple(found))


def head_tail(length: int, ranks: int) -> Sharding:
    """Return two runs per rank, equally far from the start and the end: equal work under a causal
    mask.
    """
    pieces = cut(length, 2 * ranks)
    ends = [(pieces[r], pieces[-1 - r]) for r in range(ranks)]
    return Sharding(tuple(tuple((lo, hi) for lo, hi in two if lo < hi) for two in ends))


def by_cost(
    length: int, ranks: int, cost: Callable[[int, int], int], runs_each: int = 2
) -> Sharding:
    """Return the same number of runs per rank, balanced greedily.

    The most expensive remaining run goes to the rank with the least work. `cost(lo, hi)` is the
    work of a run.
    """
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
    """Return the intervals that are not empty, with adjacent ones joined."""
    return tuple(merged(pieces))


def merged(intervals: Iterable[Interval], lo: int = 0, hi: int | None = None) -> list[Interval]:
    """Return the union of intervals, cut to `[lo, hi)`, as the fewest ascending intervals."""
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
    """Return the parts of intervals that lie in none of the others."""
    found = list(intervals)
    for lo, hi in others:
        found = [
            piece
            for a, b in found
            for piece in ((a, min(b, lo)), (max(a, hi), b))
            if piece[0] < piece[1]
        ]
    return found
