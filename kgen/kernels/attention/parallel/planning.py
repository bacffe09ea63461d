"""The keys that each rank needs from each other rank, for sequences that are sharded along
positions.

Positions count from the start of the whole sequence. Intervals `(lo, hi)` are half-open. A `Mask`
returns intervals that contain all keys which a run of queries sees, and the reverse. From these and
the sharding, each rank computes the same `Plan`: which queries attend to which keys, and how keys
are transferred.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from .kernel_calls import Calls, calls_of, pieces
from .sharding import TILE, Interval, Sharding, by_cost, contiguous, head_tail, merged, without

Ranges = Callable[..., Sequence[Interval]]


# --- masks ------------------------


@dataclass(frozen=True)
class Mask:
    """Ranges of a mask: intervals that contain every key that a run of queries sees, and the
    reverse.

    keys: `keys(b=, h=, q_start=, q_last=, **given)` returns intervals of keys for the queries
    `q_start .. q_last`. queries: the same for keys `kv_start .. kv_last`, or None if there is no
    range. given: numbers and `Rows` that these functions read.
    batches, heads: the number of sequences and heads whose ranges differ.
    starts: for packed sequences, the starts of all sequences and the end, of queries and of keys.
    """

    keys: Ranges
    queries: Ranges | None
    given: Mapping[str, object]
    batches: int = 1
    heads: int = 1
    starts: tuple[Sequence[int], Sequence[int]] | None = None

    def keys_of(self, lo: int, hi: int) -> Iterator[Interval]:
        """Yield intervals of keys for the queries `[lo, hi)`."""
        return self._of(self.keys, "q", lo, hi)

    def queries_of(self, lo: int, hi: int) -> Iterator[Interval]:
        """Yield intervals of queries for the keys `[lo, hi)`."""
        if self.queries is None:
            return iter([(0, MOST)])
        return self._of(self.queries, "kv", lo, hi)

    def _of(self, ranges: Ranges, side: str, lo: int, hi: int) -> Iterator[Interval]:
        if self.starts is None:
            for b in range(self.batches):
                yield from self._by_head(ranges, side, b, lo, hi, self.given)
            return
        own, others = self.starts if side == "q" else self.starts[::-1]
        for b in range(max(0, bisect.bisect_right(own, lo) - 1), len(own) - 1):
            if own[b] >= hi:
                return
            first, last = max(lo, own[b]) - own[b], min(hi, own[b + 1]) - own[b]
            lengths = [starts[b + 1] - starts[b] for starts in self.starts]
            given = {**self.given, "SQ": lengths[0], "SK": lengths[1]}
            found = self._by_head(ranges, side, b, first, last, given) if first < last else ()
            for a, z in merged(found, 0, others[b + 1] - others[b]):
                yield others[b] + a, others[b] + z

    def _by_head(
        self, ranges: Ranges, side: str, b: int, lo: int, hi: int, given: Mapping[str, object]
    ) -> Iterator[Interval]:
        for h in range(self.heads):
            yield from ranges(b=b, h=h, **{f"{side}_start": lo, f"{side}_last": hi - 1}, **given)


MOST = 2**31
"""Larger than any position."""


# --- plans ------------------------


@dataclass(frozen=True)
class Pair:
    """A run of queries of one rank, and a run of keys of a rank that these queries may see."""

    q_rank: int
    kv_rank: int
    q: Interval
    kv: Interval


@dataclass(frozen=True)
class Plan:
    """The kernel calls of each rank, and the transfers of keys between ranks.

    gathered: if True, a rank receives all keys at once, into a buffer indexed by position.
    Otherwise it receives keys from one rank after the other.
    shared: ranks and runs of keys that all ranks need; each is broadcast once.
    of: a digest of the function, and of the numbers and sizes that its mask reads.
    """

    q: Sharding
    kv: Sharding
    pairs: tuple[Pair, ...]
    gathered: bool = False
    shared: tuple[tuple[int, Interval], ...] = ()
    of: int = 0

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.q.ranks

    def pairs_of(self, q_rank: int, kv_rank: int) -> list[Pair]:
        """Return the pairs of queries of one rank and keys of another, or of the same one."""
        return self._by_ranks.get((q_rank, kv_rank), [])

    def sent(self, kv_rank: int, q_rank: int) -> list[Interval]:
        """Return the runs of keys that one rank sends to another, without shared ones."""
        if kv_rank == q_rank:
            return []
        if (kv_rank, q_rank) not in self._sent:
            needed = merged(p.kv for p in self.pairs_of(q_rank, kv_rank))
            self._sent[kv_rank, q_rank] = without(needed, self.shared_by(kv_rank))
        return self._sent[kv_rank, q_rank]

    def shared_by(self, kv_rank: int) -> list[Interval]:
        """Return the runs of keys that a rank broadcasts."""
        return [interval for rank, interval in self.shared if rank == kv_rank]

    @cached_property
    def few(self) -> bool:
        """True if some rank receives keys, no rank receives more than it owns, and none are
        shared.
        """
        taken = [(self.received(rank), self.kv.local(rank)) for rank in range(self.ranks)]
        return (
            not self.shared
            and any(one for one, _ in taken)
            and all(one <= own for one, own in taken)
        )

    def received(self, rank: int) -> int:
        """Return the number of keys that a rank receives."""
        own = sum(hi - lo for other in range(self.ranks) for lo, hi in self.sent(other, rank))
        return own + sum(hi - lo for other, (lo, hi) in self.shared if other != rank)

    def calls(self, rank: int, back: bool) -> Calls:
        """Return the kernel calls of a rank when keys are gathered, for forward or for backward
        (`back`).
        """
        if (rank, back) not in self._calls:
            mine = [pair for pair in self.pairs if pair.q_rank == rank]
            own, others = (
                [(p.q, p.kv) for p in mine if (p.kv_rank == rank) is here] for here in (True, False)
            )
            self._calls[rank, back] = calls_of(self.q.joined.parts[rank], own, others, back)
        return self._calls[rank, back]

    def several(self, q_rank: int, keys: Interval) -> bool:
        """True if a rank adds more than one part to the gradient of one of these keys."""
        found = self._several.get((q_rank, keys))
        if found is None:
            if self.gathered:
                runs = [kv for _, kv in self.calls(q_rank, back=True).rest]
            else:
                runs = [pair.kv for pair in self.pairs if pair.q_rank == q_rank]
            seen = sorted(one for run in runs for one in merged([run], *keys))
            found = any(later[0] < sooner[1] for sooner, later in pairwise(seen))
            self._several[q_rank, keys] = found
        return found

    @cached_property
    def kept(self) -> dict[Any, Any]:
        """Cache for values that depend on this plan, by function and arguments."""
        return {}

    @cached_property
    def _sent(self) -> dict[tuple[int, int], list[Interval]]:
        return {}

    @cached_property
    def _several(self) -> dict[tuple[int, Interval], bool]:
        return {}

    @cached_property
    def _calls(self) -> dict[tuple[int, bool], Calls]:
        return {}

    @cached_property
    def _by_ranks(self) -> dict[tuple[int, int], list[Pair]]:
        found: dict[tuple[int, int], list[Pair]] = {}
        for pair in self.pairs:
            found.setdefault((pair.q_rank, pair.kv_rank), []).append(pair)
        return found


def planned(
    q: Sharding, kv: Sharding, mask: Mask, gathered: bool | None = None, few: int = 4096
) -> Plan:
    """Plan the calls and transfers of a mask.

    By default, keys are gathered under two conditions. Ranks need more than half of the keys of
    others. There are two ranks, or at most `few` keys per rank. Fewer, larger calls then outweigh
    the memory and the later start. `gathered` overrides this.

    Raises `ValueError` if the shardings have different numbers of ranks.
    """
    if q.ranks != kv.ranks:
        raise ValueError(
            f"queries and keys must have the same number of ranks, got {q.ranks} and {kv.ranks}"
        )
    plan = Plan(q, kv, tuple(_pairs(q.joined, kv.joined, mask)))
    if gathered is None:
        ranks = range(q.ranks)
        most = sum(kv.length - kv.local(rank) for rank in ranks)
        needed = sum(plan.received(rank) for rank in ranks)
        if q.ranks > 2 and 2 * needed <= most:
            return replace(plan, shared=tuple(_shared(plan)))
        longest = max((kv.local(rank) for rank in ranks), default=0)
        gathered = 2 * needed > most and (q.ranks == 2 or (q.ranks > 2 and longest <= few))
    if gathered:
        return Plan(q, kv, tuple(_pairs(q.joined, kv.joined, mask, pieces)), gathered=True)
    return plan


def _pairs(
    q: Sharding, kv: Sharding, mask: Mask, own_pieces: Callable[..., list[Interval]] | None = None
) -> Iterator[Pair]:
    for q_rank, q_part in enumerate(q.parts):
        for run in q_part:
            seen = merged(mask.keys_of(*run), 0, kv.length)
            for kv_rank, kv_part in enumerate(kv.parts):
                parts: Sequence[Interval] = kv_part
                if own_pieces is not None and kv_rank == q_rank:
                    parts = [piece for own in kv_part for piece in own_pieces(*own)]
                for keys in (keys for part in parts for keys in merged(seen, *part)):
                    queries = merged(mask.queries_of(*keys), *run)
                    if queries:
                        hull = queries[0][0], queries[-1][1]
                        yield Pair(q_rank, kv_rank, hull, keys)


def _shared(plan: Plan) -> Iterator[tuple[int, Interval]]:
    """Yield the runs of keys that all other ranks need, with their owners."""
    for rank in range(plan.ranks):
        needs = [plan.sent(rank, other) for other in range(plan.ranks) if other != rank]
        common = needs[0]
        for need in needs[1:]:
            common = [both for lo, hi in need for both in merged(common, lo, hi)]
        yield from ((rank, interval) for interval in common)


# --- cost ------------------------


def work(mask: Mask, length: int, lo: int, hi: int) -> int:
    """Return the number of pairs in the tiles that kernels visit for the queries `[lo, hi)` and
    `length` keys.
    """
    total = 0
    for start in range(lo, hi, TILE):
        end = min(start + TILE, hi)
        total += (end - start) * sum(b - a for a, b in merged(mask.keys_of(start, end), 0, length))
    return total


def chosen(mask: Mask, length: int, ranks: int) -> tuple[str, Sharding]:
    """Choose the sharding with the lowest maximum work per rank, and return its name and itself.

    Within 2 %, prefer fewer keys sent, then the earlier one in `SHARDINGS`. A received key costs as
    much as `EXCHANGED` pairs of positions.
    """
    found = []
    for name in SHARDINGS:
        sharding = sharded(name, mask, length, ranks)
        plan = planned(sharding, sharding, mask)
        received = [plan.received(rank) for rank in range(ranks)]
        done = [sum(work(mask, length, *run) for run in part) for part in sharding.parts]
        most = max(own + EXCHANGED * keys for own, keys in zip(done, received, strict=True))
        found.append((most, sum(received), name, sharding))
    least = min(most for most, *_ in found)
    _, name, sharding = min(
        (row[1:] for row in found if row[0] <= 1.02 * least), key=lambda row: row[0]
    )
    return name, sharding


EXCHANGED = 64
"""Pairs of positions that a GPU computes in the time in which it receives a key.

Estimated for a link of 350 GB/s, 600 TFLOP/s, and heads of 128 columns in 16 bits, forward.
"""


def sharded(name: str, mask: Mask, length: int, ranks: int) -> Sharding:
    """Return a sharding by its name. Raises `ValueError` for an unknown name."""
    if name == "contiguous":
        return contiguous(length, ranks)
    if name == "head_tail":
        return head_tail(length, ranks)
    if name == "by_cost":
        return by_cost(length, ranks, lambda lo, hi: work(mask, length, lo, hi))
    raise ValueError(f"unknown sharding {name!r}: choose {', '.join(SHARDINGS)} or auto")


SHARDINGS = ("contiguous", "head_tail", "by_cost")


# --- encoding ------------------------


def encoded(plan: Plan) -> list[int]:
    """Encode a plan as integers, which operators take as a tensor."""
    found = [plan.of, int(plan.gathered), plan.ranks]
    for sharding in (plan.q, plan.kv):
        for part in sharding.parts:
            found += [len(part), *(x for run in part for x in run)]
    found += [len(plan.pairs), *(x for p in plan.pairs for x in (p.q_rank, p.kv_rank, *p.q, *p.kv))]
    return [*found, len(plan.shared), *(x for rank, run in plan.shared for x in (rank, *run))]


def decoded(numbers: Sequence[int]) -> Plan:
    """Decode a plan from the integers of `encoded`."""
    rest = iter(numbers)

    def take() -> int:
        return next(rest)

    def run() -> Interval:
        return take(), take()

    of, gathered, ranks = take(), bool(take()), take()
    q, kv = (
        Sharding(tuple(tuple(run() for _ in range(take())) for _ in range(ranks))) for _ in "qk"
    )
    pairs = tuple(Pair(take(), take(), run(), run()) for _ in range(take()))
    shared = tuple((take(), run()) for _ in range(take()))
    return Plan(q, kv, pairs, gathered, shared, of)


# --- buffers and functions that ranges read ------------------------


class Rows:
    """A buffer on the host that ranges read. Elements out of bounds are zero, as in kernels."""

    def __init__(self, values: Sequence[object] | int | float) -> None:
        self.values = values

    def __getitem__(self, index: int | tuple[int, ...]) -> object:
        found: object = self.values
        for i in index if isinstance(index, tuple) else (index,):
            assert isinstance(found, Sequence), "a buffer has fewer dimensions"
            if not 0 <= i < len(found):
                return 0
            found = found[i]
        return found


def first_at_least(row: object, value: int) -> int:
    """Return the first index of an ascending row whose element is at least `value`, or the row's
    length.
    """
    values: Any = row.values if isinstance(row, Rows) else row
    return int(bisect.bisect_left(values, value))


def where(condition: object, a: object, b: object) -> object:
    """Return `a` if the condition holds, otherwise `b`."""
    return a if condition else b
