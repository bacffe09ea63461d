"""The keys that each rank needs from each other rank, for sequences that are sharded along positions.

Positions are those of the whole sequence, intervals are `(lo, hi)` without `hi`. A mask says by intervals of keys what
a run of queries sees, and by intervals of queries what sees a run of keys: never too little. From these and from who
has what follows a `Plan`, the same on all ranks: which queries attend to which keys, and how the keys come there.
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


# --- what a mask needs ------------------------


@dataclass(frozen=True)
class Mask:
    """What queries see, by intervals that hold every key which one of them sees; and the other way round.

    `keys(b=, h=, q_start=, q_last=, **given)` are intervals for the queries `q_start .. q_last`, `queries` likewise for
    keys `kv_start .. kv_last`, or None where nothing is known. `given` are numbers and `Rows` that these read.
    `batches` and `heads` are as many as differ. Of packed sequences `starts` are where each begins, of queries and of
    keys, and one more for the end.
    """

    keys: Ranges
    queries: Ranges | None
    given: Mapping[str, object]
    batches: int = 1
    heads: int = 1
    starts: tuple[Sequence[int], Sequence[int]] | None = None

    def keys_of(self, lo: int, hi: int) -> Iterator[Interval]:
        """Of the queries `[lo, hi)`."""
        return self._of(self.keys, "q", lo, hi)

    def queries_of(self, lo: int, hi: int) -> Iterator[Interval]:
        """Of the keys `[lo, hi)`."""
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
"""Beyond any position."""


# --- who needs what ------------------------


@dataclass(frozen=True)
class Pair:
    """Queries of one rank, and keys of one, of which these queries may see some."""

    q_rank: int
    kv_rank: int
    q: Interval
    kv: Interval


@dataclass(frozen=True)
class Plan:
    """The calls of a rank, and the transfers of keys between ranks.

    `gathered`: a rank takes what it needs of all others at once, each key to its place in the sequence. Else it takes
    from one after the other; `shared` are keys that all need, each sent once to all. `of` stands for what else it
    depends on: the mask, and numbers and sizes that this reads.
    """

    q: Sharding
    kv: Sharding
    pairs: tuple[Pair, ...]
    gathered: bool = False
    shared: tuple[tuple[int, Interval], ...] = ()
    of: int = 0

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.q.ranks

    def pairs_of(self, q_rank: int, kv_rank: int) -> list[Pair]:
        """The keys of a rank, another's or its own, that a rank attends to."""
        return self._by_ranks.get((q_rank, kv_rank), [])

    def sent(self, kv_rank: int, q_rank: int) -> list[Interval]:
        """The keys that go from one rank to another alone."""
        if kv_rank == q_rank:
            return []
        if (kv_rank, q_rank) not in self._sent:
            needed = merged(p.kv for p in self.pairs_of(q_rank, kv_rank))
            self._sent[kv_rank, q_rank] = without(needed, self.shared_by(kv_rank))
        return self._sent[kv_rank, q_rank]

    def shared_by(self, kv_rank: int) -> list[Interval]:
        """The keys that a rank sends to all others at once."""
        return [interval for rank, interval in self.shared if rank == kv_rank]

    @cached_property
    def few(self) -> bool:
        """True if some ranks take keys of others, none more of them than it has, and none that all need."""
        taken = [(self.received(rank), self.kv.local(rank)) for rank in range(self.ranks)]
        return not self.shared and any(one for one, _ in taken) and all(one <= own for one, own in taken)

    def received(self, rank: int) -> int:
        """The number of keys that a rank receives."""
        own = sum(hi - lo for other in range(self.ranks) for lo, hi in self.sent(other, rank))
        return own + sum(hi - lo for other, (lo, hi) in self.shared if other != rank)

    def calls(self, rank: int, back: bool) -> Calls:
        """Where keys are gathered: what a rank computes, forward and `back`."""
        if (rank, back) not in self._calls:
            mine = [pair for pair in self.pairs if pair.q_rank == rank]
            own, others = (
                [(p.q, p.kv) for p in mine if (p.kv_rank == rank) is here] for here in (True, False)
            )
            self._calls[rank, back] = calls_of(self.q.joined.parts[rank], own, others, back)
        return self._calls[rank, back]

    def several(self, q_rank: int, keys: Interval) -> bool:
        """True if calls of a rank add more than one part to the gradient of one of these keys."""
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
        """What else was made of it, by what it is and of what."""
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


def planned(q: Sharding, kv: Sharding, mask: Mask, gathered: bool | None = None, few: int = 4096) -> Plan:
    """The plan of a mask. Where ranks need most keys of most others, they are gathered if there are two ranks, or `few`
    keys at each: then fewer and larger calls count for more than memory, and than beginning with what is there. With
    `gathered` that is decided.

    Raises `ValueError` for shardings of different numbers of ranks.
    """
    if q.ranks != kv.ranks:
        raise ValueError(f"queries are on {q.ranks} ranks, keys on {kv.ranks}")
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
    """The keys of a rank that any other rank needs."""
    for rank in range(plan.ranks):
        needs = [plan.sent(rank, other) for other in range(plan.ranks) if other != rank]
        common = needs[0]
        for need in needs[1:]:
            common = [both for lo, hi in need for both in merged(common, lo, hi)]
        yield from ((rank, interval) for interval in common)


# --- what it costs ------------------------


def work(mask: Mask, length: int, lo: int, hi: int) -> int:
    """The number of pairs in the tiles that kernels compute for the queries `[lo, hi)` and `length` keys."""
    total = 0
    for start in range(lo, hi, TILE):
        end = min(start + TILE, hi)
        total += (end - start) * sum(b - a for a, b in merged(mask.keys_of(start, end), 0, length))
    return total


def chosen(mask: Mask, length: int, ranks: int) -> tuple[str, Sharding]:
    """Of the shardings whose dearest rank has least to do, within two hundredths, the one that sends least; of these
    the simplest. Keys that a rank takes from others count as the work of as many queries with `EXCHANGED` keys."""
    found = []
    for name in SHARDINGS:
        sharding = sharded(name, mask, length, ranks)
        plan = planned(sharding, sharding, mask)
        received = [plan.received(rank) for rank in range(ranks)]
        done = [sum(work(mask, length, *run) for run in part) for part in sharding.parts]
        most = max(own + EXCHANGED * keys for own, keys in zip(done, received, strict=True))
        found.append((most, sum(received), name, sharding))
    least = min(most for most, *_ in found)
    _, name, sharding = min((row[1:] for row in found if row[0] <= 1.02 * least), key=lambda row: row[0])
    return name, sharding


EXCHANGED = 64
"""About what a link of 350 GB/s and 600 TFLOP/s make of heads of 128 columns in 16 bits, forward."""


def sharded(name: str, mask: Mask, length: int, ranks: int) -> Sharding:
    """A sharding by its name. Raises `ValueError` for a name that is none."""
    if name == "contiguous":
        return contiguous(length, ranks)
    if name == "head_tail":
        return head_tail(length, ranks)
    if name == "by_cost":
        return by_cost(length, ranks, lambda lo, hi: work(mask, length, lo, hi))
    raise ValueError(f"there is no sharding {name!r}: it is one of {', '.join(SHARDINGS)}, or auto")


SHARDINGS = ("contiguous", "head_tail", "by_cost")


# --- as numbers ------------------------


def encoded(plan: Plan) -> list[int]:
    """A plan as integers, which operators take in a tensor."""
    found = [plan.of, int(plan.gathered), plan.ranks]
    for sharding in (plan.q, plan.kv):
        for part in sharding.parts:
            found += [len(part), *(x for run in part for x in run)]
    found += [len(plan.pairs), *(x for p in plan.pairs for x in (p.q_rank, p.kv_rank, *p.q, *p.kv))]
    return [*found, len(plan.shared), *(x for rank, run in plan.shared for x in (rank, *run))]


def decoded(numbers: Sequence[int]) -> Plan:
    """The plan of `encoded`."""
    rest = iter(numbers)

    def take() -> int:
        return next(rest)

    def run() -> Interval:
        return take(), take()

    of, gathered, ranks = take(), bool(take()), take()
    q, kv = (Sharding(tuple(tuple(run() for _ in range(take())) for _ in range(ranks))) for _ in "qk")
    pairs = tuple(Pair(take(), take(), run(), run()) for _ in range(take()))
    shared = tuple((take(), run()) for _ in range(take()))
    return Plan(q, kv, pairs, gathered, shared, of)


# --- what ranges read ------------------------


class Rows:
    """A buffer whose elements ranges read, on the host; outside of it they are zero, as they are in kernels."""

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
    """The first position of an ascending row with an element that is not less; its length where there is none."""
    values: Any = row.values if isinstance(row, Rows) else row
    return int(bisect.bisect_left(values, value))


def where(condition: object, a: object, b: object) -> object:
    """One of two."""
    return a if condition else b
