"""The tiles of keys that a tile of rows sees, as ranges that programs can share."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.expr.nodes import Const, Type
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
)
from kgen.targets.triton.printer import Printer

ZERO = Const(0, Type.INT)


@dataclass(frozen=True)
class LiveSpan:
    """A span of keys in whole tiles, with the kernel's names for its ends. Each program
    processes a part.
    """

    first: str
    end: str
    lo: Code
    """The first position of the program's part."""
    hi: Code
    rest: list[Statement]
    """The statements that compute the part of the next span."""

    @property
    def tiles(self) -> str:
        """Number of tiles in the span."""
        return f"{self.end} - {self.first}"


def live_tiles(loop: TileLoop, printer: Printer) -> tuple[list[LiveSpan], list[Statement]]:
    """Return the spans of a row tile in whole KV tiles, ascending and disjoint, and their
    statements.
    """
    spans, lines = list[LiveSpan](), list[Statement]()
    several = len(loop.spans) > 1
    for number, span in enumerate(loop.spans, 1):
        tag = f"_{number}" if several else ""
        first, end, before = f"first{tag}", f"end{tag}", spans[-1].end if spans else "0"
        start: Code = Name(before)
        stop: Code = cdiv("kv_hi", "BLOCK_N")
        if span.lo != ZERO:
            lines.append(assign("kv_lo", printer.position(span.lo)))
            start = over("kv_lo", "BLOCK_N")
            start = maximum(start, before) if spans else start
        lines.append(assign("kv_hi", printer.position(span.hi)))
        if span.lo == ZERO or number == len(loop.spans):
            lines += [assign(first, start), assign(end, maximum(stop, first))]
        else:
            lo, hi = Name("kv_lo"), Name("kv_hi")
            lines.append(Assign((lo.name, hi.name), (start, stop), note="in tiles"))
            lines += [
                assign(end, end_of(lo, hi, hi, Name(before))),
                assign(first, minimum(lo, end)),
            ]
        spans.append(_share(first, end, several, last=number == len(loop.spans)))
    return spans, lines


def _share(first: str, end: str, several: bool, last: bool) -> LiveSpan:
    """Return a span and its part from `begin` to `stop`, which count tiles from the first span."""
    tiles, share = row("sub", end, first), [Name("begin"), Name("stop")]
    own: list[Code] = [maximum("begin", 0), minimum("stop", tiles)] if several else [*share]
    lo, hi = (in_tiles(row("add", first, at), Name("BLOCK_N")) for at in own)
    rest = Assign(("begin", "stop"), tuple(row("sub", at, tiles) for at in share))
    return LiveSpan(first, end, lo, hi, [] if last else [rest])
