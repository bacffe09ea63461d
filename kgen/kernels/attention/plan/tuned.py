"""Timed tile shapes: the table `tiles.json` in this folder, which `kgen tune` writes.

A row has the fastest tile of a kernel for a class of specs on a chip. A class ignores properties
that hardly affect the choice:

- bf16 and fp16 are one class.
- Head dims are padded.
- Masks differ by how their ranges move with the tile.
- Scores differ by the cost of an element.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

PATH = Path(__file__).with_name("tiles.json")

SCORES = ("plain", "bias", "function", "reads")
"""Classes of the cost of a score, in ascending order."""


@dataclass(frozen=True)
class Tile:
    """The tile shape and launch options of a kernel."""

    BLOCK_M: int
    """Queries of a tile."""
    BLOCK_N: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int
    """Depth of the load pipeline."""
    TMA: bool = False
    """True to load by tensor descriptors, if the strides allow it. Needs compute capability 9.0 or
    later.
    """


@dataclass(frozen=True, order=True)
class Class:
    """The key of a row of the table. `mask` and `score` are explained in `tiles.Problem`."""

    chip: int
    """Compute capability: 90 for 9.0."""
    bits: int
    """Bits of an element of Q, K and V."""
    width_qk: int
    """Padded columns of Q and K."""
    width_v: int
    """Padded columns of V."""
    mask: str
    score: str
    kernel: str
    """`forward`, `dq` or `dkdv`."""
    loads: str = "any"
    """`any` for the best tile, `pointers` for the best tile without TMA."""
    packed: bool = False
    """True for packed sequences of about 1000 tokens, of which a program visits few tiles."""


@cache
def read(path: Path = PATH) -> dict[Class, Tile]:
    """Read the table. Raise `ValueError` if the file has another format."""
    content = json.loads(path.read_text())
    if content.get("format") != 3:
        raise ValueError(f"{path} has format {content.get('format')}, not 3")
    names = [field.name for field in fields(Class)]
    return {Class(**{n: row[n] for n in names}): Tile(**row["tile"]) for row in content["rows"]}


def write(table: dict[Class, Tile], path: Path = PATH) -> None:
    """Write the table, sorted, with one row per line."""
    rows = [json.dumps(asdict(c) | {"tile": asdict(t)}) for c, t in sorted(table.items())]
    path.write_text('{"format": 3, "rows": [\n' + ",\n".join(rows) + "\n]}\n")
    read.cache_clear()


def nearest(wanted: Class, table: dict[Class, Tile] | None = None) -> Tile | None:
    """Return the tile of the class that is closest to `wanted`.

    Closeness compares `packed` first, then `score`, then `mask`. All other fields must be equal.
    Return None if there is no such class.
    """
    rows = read() if table is None else table

    def differences(known: Class) -> tuple[bool, int, bool, Class]:
        steps = abs(SCORES.index(known.score) - SCORES.index(wanted.score))
        return known.packed != wanted.packed, steps, known.mask != wanted.mask, known

    same = ("chip", "bits", "width_qk", "width_v", "kernel", "loads")
    alike: Iterable[Class] = (
        c for c in rows if all(getattr(c, n) == getattr(wanted, n) for n in same)
    )
    best = min(alike, key=differences, default=None)
    return None if best is None else rows[best]
