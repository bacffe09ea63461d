"""The parts of a page. A family builds a page, and a printer for each format prints its parts.

Sentences are `Words`: text, with `Code` for parts that come from the spec or a kernel. Text may
also come from users, so each printer escapes it for its format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Code:
    """Text from the spec or a kernel. If `quoted`, it is in backquotes in plain text."""

    text: str
    quoted: bool = False


Words = tuple[str | Code, ...]
"""One or more sentences. Plain text begins a new line where the text does."""


def words(*parts: str | Code) -> Words:
    """Build words from parts."""
    return parts


def quoting(text: str) -> Words:
    """Build words from a sentence of kgen, in which text in backquotes is code."""
    return tuple(
        Code(part, quoted=True) if number % 2 else part
        for number, part in enumerate(text.split("`"))
        if part
    )


def plain(said: Words) -> str:
    """Return words as plain text."""
    return "".join(
        part if isinstance(part, str) else f"`{part.text}`" if part.quoted else part.text
        for part in said
    )


@dataclass(frozen=True)
class Prose:
    """A paragraph."""

    said: Words


@dataclass(frozen=True)
class Line:
    """A line of code, a note after a comma, and sentences below it."""

    code: str = ""
    note: str = ""
    below: tuple[Words, ...] = ()


@dataclass(frozen=True)
class Lines:
    """Lines of code under a heading. Without a heading, they are indented like prose."""

    lines: tuple[Line, ...]
    heading: Words = ()


@dataclass(frozen=True)
class Formula:
    """Lines of code, set apart."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Remarks:
    """Code, set apart, and sentences about it."""

    of: Code
    said: tuple[Words, ...]


@dataclass(frozen=True)
class Table:
    """Rows of cells under column names. `plain_head` is true if plain text has the names."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Words, ...], ...]
    plain_head: bool = True


@dataclass(frozen=True)
class Listing:
    """A piece of a file."""

    file: str
    text: str


SKIPPED, MASKED, FULL = ".", "+", "#"
KINDS: Mapping[str, str] = {
    SKIPPED: "not visited",
    MASKED: "mask evaluated",
    FULL: "mask not evaluated",
}
"""The treatment of a tile, by its character."""


@dataclass(frozen=True)
class Grid:
    """Tiles of queries (rows) by keys (columns), each a character of `KINDS`.

    `tile` is the size of a tile.
    """

    rows: tuple[str, ...]
    tile: tuple[int, int]
    length: int
    title: str
    """The length, the head and the assumptions of the grid."""

    def shares(self) -> dict[str, float]:
        """Return the fraction of tiles of each kind, 0 to 1."""
        tiles = "".join(self.rows)
        return {kind: tiles.count(kind) / len(tiles) for kind in KINDS}


@dataclass(frozen=True)
class Group:
    """The bars of one name, as values by series."""

    name: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class Bars:
    """A bar chart. `stacked` bars are end to end; `logarithmic` bars begin at a power of ten."""

    title: str
    unit: str
    groups: tuple[Group, ...]
    stacked: bool = False
    logarithmic: bool = False
    palette: tuple[str, ...] = ()
    """Series in the order of their colours, if several pictures share colours."""

    @property
    def series(self) -> tuple[str, ...]:
        """The series of all groups, in order."""
        there = dict.fromkeys(name for group in self.groups for name in group.values)
        return tuple(dict.fromkeys([*(name for name in self.palette if name in there), *there]))

    def colour(self, series: str) -> int:
        """Return the index of the colour of a series."""
        return (self.palette or self.series).index(series)


Block = Prose | Lines | Formula | Remarks | Table | Listing | Grid | Bars


@dataclass(frozen=True)
class Section:
    """Blocks under a title. Plain text omits sections that are `for_pages`."""

    title: str
    blocks: tuple[Block, ...]
    for_pages: bool = False


@dataclass(frozen=True)
class Page:
    """A page about one subject."""

    title: str
    summary: str
    sections: tuple[Section, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The content for programs: numbers, flags and expressions by name."""

    def grids(self) -> tuple[Grid, ...]:
        """Return the grids of all sections."""
        return tuple(b for section in self.sections for b in section.blocks if isinstance(b, Grid))


@dataclass(frozen=True)
class Drawing:
    """The request for grids.

    `length` is the length of sequences; None chooses one that shows the mask. `heads` is the number
    of heads, each with its own grid. `given` has run-time parameters by name, as text. `ranks` is
    the number of ranks that share the sequences.
    """

    length: int | None = None
    heads: int | None = None
    given: Mapping[str, str] | None = None
    ranks: int | None = None
