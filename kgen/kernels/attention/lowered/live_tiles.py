"""The tiles of keys that a tile of rows sees, as ranges that programs can share."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.expr.nodes import Const, Type, Var, walk
from kgen.expr.spans import Span
from kgen.kernels.attention.lowered.lowering import read_before
from kgen.kernels.attention.lowered.ranges import end_of, in_tiles
from kgen.kernels.attention.plan.model import TileLoop
from kgen.targets.code import (
    Assign,
    Code,
    Name,
    Statement,
    assign,
    cdiv,
    maximum,
    minimum,
    over,
    row,
    text,
    total,
)
from kgen.targets.triton.printer import Printer

ZERO = Const(0, Type.INT)
ZERO_TILES = text("0")
BLOCK = Name("BLOCK_N")
TILES = "n_tiles"
"""The name of the number of tiles."""


@dataclass(frozen=True)
class LiveSpan:
    """A span of keys in whole tiles, with the kernel's names for its ends. Each program
    processes a part.
    """

    first: str | None
    """None if it is tile 0."""
    end: str
    lo: Code
    """The first position of the program's part."""
    hi: Code
    rest: list[Statement]
    """The statements that compute the part of the next span."""

    @property
    def names(self) -> list[str]:
        """The names of its ends."""
        return [self.end] if self.first is None else [self.first, self.end]

    @property
    def tiles(self) -> Code:
        """Number of tiles in the span."""
        return Name(self.end) if self.first is None else row("sub", self.end, self.first)

    @property
    def ends(self) -> tuple[Code, Code]:
        """The first position of the span, and its end."""
        first = ZERO_TILES if self.first is None else in_tiles(Name(self.first), BLOCK)
        return first, in_tiles(Name(self.end), BLOCK)


@dataclass(frozen=True)
class LiveTiles:
    """The spans of a row tile, and the statements that find them."""

    spans: tuple[LiveSpan, ...]
    live_lines: list[Statement]

    @property
    def live_results(self) -> list[str]:
        """The names of the ends of all spans."""
        return [name for span in self.spans for name in span.names]

    @property
    def live_words(self) -> str:
        """The results, in words."""
        if self.live_results == [TILES]:
            return "Return the number of KV tiles, from tile 0, that the queries of a row tile see."
        each = "each range" if len(self.spans) > 1 else "the range"
        return (
            f"Return {each} of KV tiles that the queries of a row tile see: the first tile, and "
            "one past the last."
        )

    @property
    def n_tiles(self) -> Code:
        """Number of tiles of keys that a row tile sees."""
        first, *rest = (span.tiles for span in self.spans)
        return total(first, *rest)

    @property
    def tiles_counted(self) -> list[Statement]:
        """The statement that assigns this number, unless it is a result."""
        return [] if self.live_results == [TILES] else [assign(TILES, self.n_tiles)]


def live_tiles(loop: TileLoop, printer: Printer) -> LiveTiles:
    """Return the spans of a row tile in whole KV tiles, ascending and disjoint."""
    lines, found = _read_once(loop, printer)
    spans = list[LiveSpan]()
    several = len(found) > 1
    for number, span in enumerate(found, 1):
        tag = f"_{number}" if several else ""
        first, end, before = f"first{tag}", f"end{tag}", spans[-1].end if spans else "0"
        from_start = span.lo == ZERO and not spans
        if from_start and not several:
            end = TILES
        start: Code = Name(before)
        stop: Code = cdiv("kv_hi", "BLOCK_N")
        if span.lo != ZERO:
            lines.append(assign("kv_lo", printer.position(span.lo)))
            start = over("kv_lo", "BLOCK_N")
            start = maximum(start, before) if spans else start
        lines.append(assign("kv_hi", printer.position(span.hi)))
        if from_start:
            lines.append(assign(end, maximum(stop, 0)))
        elif span.lo == ZERO or number == len(found):
            lines += [assign(first, start), assign(end, maximum(stop, first))]
        else:
            lo, hi = Name("kv_lo"), Name("kv_hi")
            lines.append(Assign((lo.name, hi.name), (start, stop), note="in tiles"))
            lines += [
                assign(end, end_of(lo, hi, hi, Name(before))),
                assign(first, minimum(lo, end)),
            ]
        last = number == len(found)
        spans.append(_share(None if from_start else first, end, several, last))
    return LiveTiles(tuple(spans), lines)


def _read_once(loop: TileLoop, printer: Printer) -> tuple[list[Statement], list[Span]]:
    """Return the loads of numbers that the ends of spans read more than once.

    The returned spans use their names.
    """
    nodes = [node for span in loop.spans for end in (span.lo, span.hi) for node in walk(end)]
    names = {
        node: name
        for node, name in read_before(printer.program).items()
        if isinstance(name, Var) and nodes.count(node) > 1
    }
    lines: list[Statement] = [assign(name.name, printer.own(node)) for node, name in names.items()]
    return lines, [span.over(names) for span in loop.spans]


def _share(first: str | None, end: str, several: bool, last: bool) -> LiveSpan:
    """Return a span and its part from `begin` to `stop`, which count tiles from the first span."""
    tiles: Code = Name(end) if first is None else row("sub", end, first)
    share = [Name("begin"), Name("stop")]
    own: list[Code] = [maximum("begin", 0), minimum("stop", tiles)] if several else [*share]
    lo, hi = (in_tiles(at if first is None else row("add", first, at), BLOCK) for at in own)
    rest = Assign(("begin", "stop"), tuple(row("sub", at, tiles) for at in share))
    return LiveSpan(first, end, lo, hi, [] if last else [rest])
