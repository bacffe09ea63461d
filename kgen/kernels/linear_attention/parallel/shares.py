"""The sequences of each rank, and the states that pass between ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Share:
    """The sequences of one rank, `first` to `last` - 1 of the batch.

    ended: the sequences `first` to `ended` - 1 end on this rank.
    enters, leaves: sequences come from an earlier rank, or continue on a later one.
    crossing: the number of sequences that cross the boundary of two ranks.
    starts: of packed sequences, the offsets in the tokens of this rank. Empty for other batches.
    """

    first: int
    last: int
    ended: int
    enters: bool
    leaves: bool
    crossing: int
    starts: tuple[int, ...] = ()

    @property
    def sequences(self) -> int:
        """The number of states that kernels take. Packed sequences are at least one."""
        return max(self.last - self.first, len(self.starts) - 1)

    @property
    def carries(self) -> bool:
        """True if the same sequences enter and leave, so that a state passes through."""
        return self.enters and self.leaves and self.last - self.first == self.crossing

    @property
    def entering(self) -> slice:
        """The sequences of this rank that come from an earlier one."""
        return slice(0, self.crossing)

    @property
    def leaving(self) -> slice:
        """The sequences of this rank that continue on a later one."""
        count = self.last - self.first
        return slice(count - self.crossing, count)


def of_rows(ranks: int, batch: int) -> list[Share]:
    """Return the shares of a batch whose rows are sharded: each row crosses all boundaries."""
    return [
        Share(0, batch, 0 if rank + 1 < ranks else batch, rank > 0, rank + 1 < ranks, batch)
        for rank in range(ranks)
    ]


def of_packed(lengths: Sequence[int], starts: Sequence[int]) -> list[Share]:
    """Return the shares of packed sequences. `lengths` has the number of tokens of each rank.

    Raise `ValueError` if `starts` does not begin with 0, decreases, or ends after the last token.
    """
    total = sum(lengths)
    if starts[0] != 0 or starts[-1] > total or any(a > b for a, b in pairwise(starts)):
        raise ValueError(
            "cu_seqlens must begin with 0, must not decrease, and must end at most at the number "
            f"of tokens of all ranks, {total}, got {list(starts)}"
        )
    runs = pairwise(accumulate(lengths, initial=0))
    return [_packed(starts, rank, lo, hi) for rank, (lo, hi) in enumerate(runs)]


def _packed(starts: Sequence[int], rank: int, lo: int, hi: int) -> Share:
    """Return the share of a rank with the tokens `lo` to `hi` - 1.

    A sequence ends on the rank of its last token. Empty ones at 0 belong to the first rank.
    """
    count, ends = len(starts) - 1, starts[1:]
    first, ended = bisect_right(ends, lo) if rank else 0, bisect_right(ends, hi)
    enters = lo > 0 and first < count and starts[first] < lo
    leaves = ended < count and starts[ended] < hi
    last = ended + leaves
    own = [min(max(start, lo), hi) - lo for start in starts[first : last + 1]]
    return Share(first, last, ended, enters, leaves, 1, tuple(own if last > first else (0, 0)))
