"""Tile shapes that were timed: `tiles.json` beside this module, which `kgen tune` writes.

A row says which tile was the fastest for a kernel of a class of attention on a chip. Classes leave out what hardly
matters to tiles: bf16 and fp16 are alike, head dims count as they are padded, masks by how their ranges move with the
tile, scores by what an element costs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

PATH = Path(__file__).with_name("tiles.json")

SCORES = ("plain", "bias", "function", "reads")
"""What an element of the scores costs, ascending."""


@dataclass(frozen=True)
class Tile:
    """Rows of queries and of keys that a program holds at once, its warps, and the depth of its load pipeline.

    `TMA` loads tiles through tensor descriptors where a tensor's strides allow it (compute capability 9.0 and later).
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    TMA: bool = False


@dataclass(frozen=True, order=True)
class Class:
    """What a row of the table is for.

    `chip` is a compute capability (90 for 9.0), `bits` the size of an element, `width_qk` and `width_v` the padded head
    dims, `mask` and `score` as in `tiles.Problem`, `kernel` one of `forward`, `dq`, `dkdv`. `loads` is `any`
    for the best tile of all, `pointers` for the best of those without TMA. `packed`: sequences of a thousand tokens in
    one row, of which a program visits few tiles.
    """

    chip: int
    bits: int
    width_qk: int
    width_v: int
    mask: str
    score: str
    kernel: str
    loads: str = "any"
    packed: bool = False


@cache
def read(path: Path = PATH) -> dict[Class, Tile]:
    """The table. Raises `ValueError` for a file of another format."""
    content = json.loads(path.read_text())
    if content.get("format") != 3:
        raise ValueError(f"{path} has format {content.get('format')}, not 3")
    names = [field.name for field in fields(Class)]
    return {Class(**{n: row[n] for n in names}): Tile(**row["tile"]) for row in content["rows"]}


def write(table: dict[Class, Tile], path: Path = PATH) -> None:
    """The table, sorted, one row a line."""
    rows = [json.dumps(asdict(c) | {"tile": asdict(t)}) for c, t in sorted(table.items())]
    path.write_text('{"format": 3, "rows": [\n' + ",\n".join(rows) + "\n]}\n")
    read.cache_clear()


def nearest(wanted: Class, table: dict[Class, Tile] | None = None) -> Tile | None:
    """The tile of a class, or of the one that differs least: in whether sequences are packed, then in score, then in
    mask; None where the chip, the element size, the head dims, the kernel or such loads were never timed."""
    rows = read() if table is None else table

    def differences(known: Class) -> tuple[bool, int, bool, Class]:
        steps = abs(SCORES.index(known.score) - SCORES.index(wanted.score))
        return known.packed != wanted.packed, steps, known.mask != wanted.mask, known

    same = ("chip", "bits", "width_qk", "width_v", "kernel", "loads")
    alike: Iterable[Class] = (c for c in rows if all(getattr(c, n) == getattr(wanted, n) for n in same))
    best = min(alike, key=differences, default=None)
    return None if best is None else rows[best]
