"""Tables by chip in emitted files: rows `(chips, value)`, of which a device takes the first that names it or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
Row = tuple[tuple[int, ...], T]


def rows(table: Mapping[int, Sequence[T]]) -> list[Row[T]]:
    """The values of each chip in its order, those of several chips once.

    The last rows, which name no chip, are those of chip 0. Every chip may take them, so it does not have them twice.
    """
    anywhere = list(table[0])
    found: list[tuple[list[int], T]] = []
    for chip in sorted(table, reverse=True):
        own = list(table[chip]) if chip else []
        if own[-len(anywhere) :] == anywhere:
            own = own[: -len(anywhere)]
        place = 0
        for number, value in enumerate(own):
            # As far behind as the chip's later values, which may be there already, allow.
            later = [i for i, (_, other) in enumerate(found) if i >= place and other in own[number:]]
            place = later[0] if later else len(found)
            if later and found[place][1] == value:
                found[place][0].append(chip)
            else:
                found.insert(place, ([chip], value))
            place += 1
    return [*((tuple(chips), value) for chips, value in found), *(((), value) for value in anywhere)]
