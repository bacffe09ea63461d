"""The kernel calls of a rank when keys are gathered: few calls, some of them with its own keys during each transfer.

A call has a run of queries and one of keys; what of these the mask leaves out, kernels do not visit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .sharding import TILE, Interval, merged

Run = tuple[Interval, Interval]
"""Queries and keys, whoever has them."""
PIECES = 4
"""Of each run of a rank's own keys, which calls have or have not."""
FORWARD, BACK, HOME = 2, 1, 2
"""Of so many pieces those that are kept for a transfer: of keys, forward and back, and of gradients."""


@dataclass(frozen=True)
class Calls:
    """What a rank computes: `first` with keys of its own, while those of others come, `last` likewise, while gradients
    go home, and `rest` between them."""

    first: list[Run]
    rest: list[Run]
    last: list[Run]


def pieces(lo: int, hi: int) -> list[Interval]:
    """A run of own keys in pieces, of whole tiles where there are so many."""
    length = hi - lo
    step = TILE if length >= PIECES * TILE else 1
    ends = [lo + length * i // PIECES // step * step for i in range(PIECES)]
    return [piece for piece in pairwise([*ends, hi]) if piece[0] < piece[1]]


def calls_of(queries: Sequence[Interval], own: Sequence[Run], others: Sequence[Run], back: bool) -> Calls:
    """Of a rank with these runs of queries, none beside another: calls with its `own` keys, by `pieces`, and with those
    of `others`, forward or `back`.

    Runs that need no others' keys come first: nothing is kept then for the transfer of keys. A run that does has one
    call, but for what is kept of its own keys.
    """
    waiting = [run for run in queries if _of(run, others)]
    first = [call for run in queries if run not in waiting for call in _joined(_of(run, own))]
    last: list[Run] = []
    number = len({keys for _, keys in own})
    if waiting and back:
        last, own = _kept(waiting[-1], own, others, number * HOME // PIECES)
    if waiting and not first:
        kept, own = _kept(waiting[0], own, others, number * (BACK if back else FORWARD) // PIECES)
        first += kept
    rest = [call for run in waiting for call in _joined([*_of(run, own), *_of(run, others)])]
    return Calls(first, rest, last)


def _of(queries: Interval, calls: Sequence[Run]) -> list[Run]:
    """Those of a run of queries."""
    return [call for call in calls if queries[0] <= call[0][0] < queries[1]]


def _kept(
    queries: Interval, own: Sequence[Run], others: Sequence[Run], number: int
) -> tuple[list[Run], list[Run]]:
    """What a run of queries computes with own keys beside a transfer, and what own calls are left."""
    kept = _outer(_of(queries, own), _of(queries, others))[: max(1, number)]
    return _joined(kept), [call for call in own if call not in kept]


def _outer(own: Sequence[Run], others: Sequence[Run]) -> list[Run]:
    """Calls with own keys, those farthest from others' first: what is left lies beside them."""
    keys = [keys for _, keys in others]
    lo, hi = min(a for a, _ in keys), max(z for _, z in keys)
    above = [call for call in own if call[1][0] >= hi]
    below = [call for call in own if call[1][1] <= lo]
    if below and not above:
        return sorted(below, key=_keys)
    return sorted(above or own, key=_keys, reverse=True)


def _keys(call: Run) -> Interval:
    return call[1]


def _joined(calls: Sequence[Run]) -> list[Run]:
    """Those of one run of queries, with keys side by side, as one."""
    found = []
    for keys in merged(kv for _, kv in calls):
        seen = [q for q, kv in calls if keys[0] <= kv[0] and kv[1] <= keys[1]]
        found.append(((min(a for a, _ in seen), max(z for _, z in seen)), keys))
    return found
