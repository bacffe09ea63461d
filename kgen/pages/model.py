"""What a page is made of. A family fills it, and a printer for each format knows its parts and nothing else.

What is said is `Words`: text, with `Code` where the text is of the spec or of a kernel. Text comes from users, too:
a printer decides what its format needs of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Code:
    """A piece of a line that is of the spec or of a kernel. As plain text it is in backquotes if it is `quoted`."""

    text: str
    quoted: bool = False


Words = tuple[str | Code, ...]
"""A sentence or several. An end of line in the text is where plain text begins a new one."""


def words(*parts: str | Code) -> Words:
    """Parts as words."""
    return parts


def quoting(text: str) -> Words:
    """A sentence of our own, whose pieces in backquotes are code."""
    return tuple(
        Code(part, quoted=True) if number % 2 else part for number, part in enumerate(text.split("`")) if part
    )


def plain(said: Words) -> str:
    """Words as plain text."""
    return "".join(
        part if isinstance(part, str) else f"`{part.text}`" if part.quoted else part.text for part in said
    )


@dataclass(frozen=True)
class Prose:
    """A paragraph."""

    said: Words


@dataclass(frozen=True)
class Line:
    """A line of code, what is said of it behind a comma, and what is said below."""

    code: str = ""
    note: str = ""
    below: tuple[Words, ...] = ()


@dataclass(frozen=True)
class Lines:
    """Lines of code under a heading; without one they are set in like prose."""

    lines: tuple[Line, ...]
    heading: Words = ()


@dataclass(frozen=True)
class Formula:
    """Lines of code that stand apart."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Remarks:
    """Sentences about the code above them, which stands apart from what is before."""

    of: Code
    said: tuple[Words, ...]


@dataclass(frozen=True)
class Table:
    """Rows of cells under the names of their columns. `plain_head`: plain text has the names, too."""

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
    SKIPPED: "never visited",
    MASKED: "with the mask",
    FULL: "without it",
}
"""What becomes of a tile, by its character."""


@dataclass(frozen=True)
class Grid:
    """Tiles of queries (down) by keys (across), a character of `KINDS` for each, of `tile` queries and keys."""

    rows: tuple[str, ...]
    tile: tuple[int, int]
    length: int
    title: str
    """What it is of: a length, the head, what was assumed."""

    def shares(self) -> dict[str, float]:
        """How much of the tiles is of each kind."""
        tiles = "".join(self.rows)
        return {kind: tiles.count(kind) / len(tiles) for kind in KINDS}


@dataclass(frozen=True)
class Group:
    """The bars of one name: values by series."""

    name: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class Bars:
    """Bars side by side, or end to end (`stacked`); `logarithmic` ones begin at a power of ten."""

    title: str
    unit: str
    groups: tuple[Group, ...]
    stacked: bool = False
    logarithmic: bool = False
    palette: tuple[str, ...] = ()
    """Series in the order of their colours, where several pictures share these."""

    @property
    def series(self) -> tuple[str, ...]:
        """The series that groups have, in their order."""
        there = dict.fromkeys(name for group in self.groups for name in group.values)
        return tuple(dict.fromkeys([*(name for name in self.palette if name in there), *there]))

    def colour(self, series: str) -> int:
        """The number of a series among colours."""
        return (self.palette or self.series).index(series)


Block = Prose | Lines | Formula | Remarks | Table | Listing | Grid | Bars


@dataclass(frozen=True)
class Section:
    """Blocks under a title. Plain text leaves out those that are `for_pages`."""

    title: str
    blocks: tuple[Block, ...]
    for_pages: bool = False


@dataclass(frozen=True)
class Page:
    """Everything that is said of one thing."""

    title: str
    summary: str
    sections: tuple[Section, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The same for programs: numbers, flags and expressions under their names."""

    def grids(self) -> tuple[Grid, ...]:
        """The grids of all sections."""
        return tuple(b for section in self.sections for b in section.blocks if isinstance(b, Grid))


@dataclass(frozen=True)
class Drawing:
    """What grids are wanted of: sequences of `length`, or of one that shows the mask; so many heads, each by itself;
    run-time params by name, as they were `given`. `ranks` asks how sequences would be spread over so many."""

    length: int | None = None
    heads: int | None = None
    given: Mapping[str, str] | None = None
    ranks: int | None = None
