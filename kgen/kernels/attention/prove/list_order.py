"""Obligations of the lists of a block mask: each block is listed once, and each of its tiles is
visited once.

Templates contain `_block_list` and the loops over its lists (`_block_mask.j2`, `_tiles.j2`,
templates of schedules). This module repeats their index arithmetic, and a test compares these lines
of the templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import z3

from kgen.kernels.attention.plan.block_mask import BLOCK_SIZE
from kgen.prove.obligations import Obligation
from kgen.prove.world import LONGEST, Place

NOTHING, PART, WHOLE_BLOCK = range(3)
"""Kinds of blocks, as `_block_kind` returns them."""


@dataclass
class Listed:
    """A row of blocks of arbitrary kinds, with its list and the properties of running counts at
    named columns.
    """

    size: Any
    """Number of positions of a row."""
    facts: list[Any] = field(default_factory=list)
    _columns: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        whole = z3.IntSort()
        self._kind = z3.Function("kind", whole, whole)
        self._count = z3.Function("count", whole, whole, whole)
        self._list = z3.Function("list", whole, whole)
        totals = [self.total(kind) for kind in range(3)]
        self.facts.extend(total >= 0 for total in totals)
        self.facts += [self.size >= 1, self.size <= LONGEST, z3.Sum(totals) == self.columns]

    @property
    def columns(self) -> Any:
        """Number of blocks of a row."""
        return (self.size + BLOCK_SIZE - 1) / BLOCK_SIZE

    def total(self, kind: int) -> Any:
        """Return the number of blocks of a kind."""
        return z3.Int(f"n_{kind}")

    def column(self, name: str) -> Any:
        """Return an arbitrary column.

        The count of a kind grows by one at each column of that kind, and only there.
        """
        column = z3.Int(name)
        counts = [self._count(kind, column) for kind in range(3)]
        self.facts += [
            column >= 0,
            column < self.columns,
            self._kind(column) >= 0,
            self._kind(column) < 3,
        ]
        self.facts.append(z3.Sum(counts) == column + 1)
        for kind, count in enumerate(counts):
            self.facts += [count >= self._is(column, kind), count <= self.total(kind)]
        for other in self._columns:
            for a, b in ((column, other), (other, column)):
                self.facts.append(z3.Implies(a == b, z3.And(self._same(a, b))))
                self.facts.append(z3.Implies(a < b, z3.And(self._grows(a, b))))
        self._columns.append(column)
        return column

    def kind(self, column: Any) -> Any:
        """Return the kind of a block."""
        return self._kind(column)

    def _is(self, column: Any, kind: int) -> Any:
        return z3.If(self._kind(column) == kind, 1, 0)

    def _grows(self, a: Any, b: Any) -> list[Any]:
        return [self._count(k, a) + self._is(b, k) <= self._count(k, b) for k in range(3)]

    def _same(self, a: Any, b: Any) -> list[Any]:
        return [self._count(k, a) == self._count(k, b) for k in range(3)]

    def place(self, column: Any) -> Any:
        """Return the entry at which `_block_list` stores a column."""
        ones, twos = self._count(PART, column), self._count(WHOLE_BLOCK, column)
        n_partial, n_full = self.total(PART), self.total(WHOLE_BLOCK)
        absent = column - ones - twos + n_partial + n_full
        kind = self._kind(column)
        return z3.If(
            kind == PART, ones - 1, z3.If(kind == WHOLE_BLOCK, n_partial + twos - 1, absent)
        )

    def stored(self, column: Any) -> Any:
        """State that the entry of a column contains that column."""
        return self._list(self.place(column)) == column

    def start(self, first: Any, i: Any) -> Any:
        """Return the position at which tile `i` begins, in the listed blocks from entry `first`
        on.
        """
        return i + (self._list(first + i / BLOCK_SIZE) - i / BLOCK_SIZE) * BLOCK_SIZE

    def part(self, kind: int) -> Any:
        """Return the first entry of the blocks of a kind."""
        return z3.IntVal(0) if kind == PART else self.total(PART)

    def named(self, kind: int, entry: Any, name: str) -> Any:
        """Return the column of an entry among the entries of a kind.

        It exists, because a count that grows by one takes every value up to its last.
        """
        column = self.column(name)
        self.facts += [self._kind(column) == kind, self._count(kind, column) == entry + 1]
        return column


def each_block_once(name: str, what: str) -> Obligation:
    """State that two blocks of a row have different entries in its list."""
    row = Listed(z3.Int("size"))
    a, b = row.column("column"), row.column("other")
    inside = z3.And(row.place(a) >= 0, row.place(a) < row.columns)
    claim = z3.And(inside, z3.Implies(a != b, row.place(a) != row.place(b)))
    return Obligation(name, what, claim, row.facts, {"size": row.size, "column": a, "other": b})


def each_tile_once(name: str, what: str, block: int, masked: bool) -> Obligation:
    """State that each position of a listed block is in one tile, and that partial blocks have the
    mask.
    """
    values: dict[str | Place, Any] = {n: z3.Int(n) for n in ("size", "position")}
    return Obligation(name, what, values=values, parts=_visits(block, masked))


@cache
def _visits(block: int, masked: bool) -> Sequence[tuple[str, Any]]:
    """Return the claims about tiles of a size, which are the same for all specs."""
    stated = [*_reached(block), *_apart(block), *_with_mask(block, masked)]
    return [(text, z3.Implies(z3.And(row.facts), claim)) for text, claim, row in stated]


Stated = Sequence[tuple[str, Any, Listed]]


def _reached(block: int) -> Stated:
    """State that some tile contains each position of a listed block."""
    row, position = Listed(z3.Int("size")), z3.Int("position")
    column = row.column("column")
    row.facts += [
        position >= 0,
        position < row.size,
        column == position / BLOCK_SIZE,
        row.stored(column),
    ]
    reached = []
    for kind in (PART, WHOLE_BLOCK):
        first = row.part(kind)
        i = (row.place(column) - first) * BLOCK_SIZE + position % BLOCK_SIZE / block * block
        visited = z3.And(i >= 0, i < row.total(kind) * BLOCK_SIZE)
        reached.append(
            z3.And(row.kind(column) == kind, visited, _in_tile(row, first, i, position, block))
        )
    return [
        ("a position without a tile", z3.Implies(row.kind(column) != NOTHING, z3.Or(reached)), row)
    ]


def _apart(block: int) -> Stated:
    """State that no two tiles contain the same position."""
    found = []
    for one, other in ((PART, PART), (PART, WHOLE_BLOCK), (WHOLE_BLOCK, WHOLE_BLOCK)):
        row, position = Listed(z3.Int("size")), z3.Int("position")
        tiles = []
        for kind, name in ((one, "column"), (other, "other")):
            i = block * z3.Int(f"tile of {name}")
            row.facts += [i >= 0, i < row.total(kind) * BLOCK_SIZE]
            row.facts.append(row.stored(row.named(kind, i / BLOCK_SIZE, name)))
            row.facts.append(_in_tile(row, row.part(kind), i, position, block))
            tiles.append(i)
        claim = tiles[0] == tiles[1] if one == other else z3.BoolVal(False)
        found.append(("a position in two tiles", claim, row))
    return found


def _with_mask(block: int, masked: bool) -> Stated:
    """State that tiles of the second part are in full blocks, and that partial blocks exist only
    with a mask.
    """
    row, i = Listed(z3.Int("size")), block * z3.Int("tile")
    row.facts += [i >= 0, i < row.total(WHOLE_BLOCK) * BLOCK_SIZE]
    column = row.named(WHOLE_BLOCK, i / BLOCK_SIZE, "column")
    row.facts.append(row.stored(column))
    listed = row.start(row.part(WHOLE_BLOCK), i) / BLOCK_SIZE
    return [("a block that is listed as full", z3.And(z3.BoolVal(masked), listed == column), row)]


def _in_tile(row: Listed, first: Any, i: Any, position: Any, block: int) -> Any:
    start = row.start(first, i)
    return z3.And(start <= position, position < start + block)
