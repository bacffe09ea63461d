"""The fastest peer of each case of a race."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]
Case = tuple[Any, ...]

OWN = "kgen"
"""Beginning of the names of kgen's files."""
BOUND = "copy"
"""A copy of the same bytes. It is a bound, not another implementation."""


def is_peer(name: str) -> bool:
    """True if a name of a race is of another implementation."""
    return name != BOUND and not name.startswith(OWN)


def case_of(row: Row) -> Case:
    """Return the spec, pass and size of a row. Rows of one case compute the same result."""
    return tuple(row.get(name) for name in ("spec", "shape", "pass", "rows", "width", "graph"))


def best_peers(rows: Iterable[Row]) -> dict[Case, Row]:
    """Return the row of the fastest peer of each case that a peer can compute."""
    best: dict[Case, Row] = {}
    for row in rows:
        if row.get("milliseconds") is None or not is_peer(row["peer"]):
            continue
        case = case_of(row)
        if case not in best or row["milliseconds"] < best[case]["milliseconds"]:
            best[case] = row
    return best
