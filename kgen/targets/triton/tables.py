"""Tables by chip in emitted files, with rows `(chips, value)`.

A device takes the first row that names its chip or names no chip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
Row = tuple[tuple[int, ...], T]


def rows(table: Mapping[int, Sequence[T]]) -> list[Row[T]]:
    """Merge the tables of all chips. A row that several chips share occurs once, and each chip
    keeps its order.

    The last rows name no chip and come from chip 0. Every chip may take them, so they are removed
    from its own rows.
    """
    anywhere = list(table[0])
    found: list[tuple[list[int], T]] = []
    for chip in sorted(table, reverse=True):
        own = list(table[chip]) if chip else []
        if own[-len(anywhere) :] == anywhere:
            own = own[: -len(anywhere)]
        place = 0
        for number, value in enumerate(own):
            # Insert as late as possible, but before the chip's later values, which may already be
            # in the list.
            later = [
                i for i, (_, other) in enumerate(found) if i >= place and other in own[number:]
            ]
            place = later[0] if later else len(found)
            if later and found[place][1] == value:
                found[place][0].append(chip)
            else:
                found.insert(place, ([chip], value))
            place += 1
    return [
        *((tuple(chips), value) for chips, value in found),
        *(((), value) for value in anywhere),
    ]
