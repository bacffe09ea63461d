"""The kernel calls of a rank when keys are gathered: few calls, with some own keys kept for each
transfer.

A call has one run of queries and one run of keys. Kernels skip the tiles that the mask leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .sharding import TILE, Interval, merged

Run = tuple[Interval, Interval]
"""A run of queries and a run of keys, of any owner."""
PIECES = 4
"""Number of pieces of each run of own keys. A call has a piece completely or not at all."""
FORWARD, BACK, HOME = 2, 1, 2
"""Number of pieces, out of `PIECES`, that are kept for a transfer.

`FORWARD` and `BACK`: transfers of keys in forward and backward. `HOME`: the transfer of gradients.
"""


@dataclass(frozen=True)
class Calls:
    """The kernel calls of a rank.

    first: calls with own keys, during the transfer of keys.
    rest: all other calls.
    last: calls with own keys, during the transfer of gradients.
    """

    first: list[Run]
    rest: list[Run]
    last: list[Run]


def pieces(lo: int, hi: int) -> list[Interval]:
    """Cut a run of own keys into pieces, of whole tiles if it has enough of them."""
    length = hi - lo
    step = TILE if length >= PIECES * TILE else 1
    ends = [lo + length * i // PIECES // step * step for i in range(PIECES)]
    return [piece for piece in pairwise([*ends, hi]) if piece[0] < piece[1]]


def calls_of(
    queries: Sequence[Interval], own: Sequence[Run], others: Sequence[Run], back: bool
) -> Calls:
    """Return the calls of a rank, for forward or for backward (`back`).

    queries: runs of queries, none adjacent to another. own: pairs with own keys, cut into `pieces`.
    others: pairs with others' keys.

    Runs of queries that need no others' keys come first. If there are any, no own keys are kept for
    the transfer of keys. Each other run of queries has one call, besides the calls with its kept
    keys.
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
    """Return the calls of a run of queries."""
    return [call for call in calls if queries[0] <= call[0][0] < queries[1]]


def _kept(
    queries: Interval, own: Sequence[Run], others: Sequence[Run], number: int
) -> tuple[list[Run], list[Run]]:
    """Return the calls with own keys that a run of queries keeps for a transfer, and the remaining
    own calls.
    """
    kept = _outer(_of(queries, own), _of(queries, others))[: max(1, number)]
    return _joined(kept), [call for call in own if call not in kept]


def _outer(own: Sequence[Run], others: Sequence[Run]) -> list[Run]:
    """Return the calls with own keys, the farthest from others' keys first, so that the rest is
    adjacent to them.
    """
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
    """Join the calls of one run of queries whose keys are adjacent."""
    found = []
    for keys in merged(kv for _, kv in calls):
        seen = [q for q, kv in calls if keys[0] <= kv[0] and kv[1] <= keys[1]]
        found.append(((min(a for a, _ in seen), max(z for _, z in seen)), keys))
    return found
