"""Dependences of the ends of a loop's range.

A consumer that holds a part of a tile can use a tighter range. This needs ends that move with the
tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kgen.expr.nodes import FIRST_AT_LEAST, Call, Const, Node, Read, Type, variables, walk
from kgen.kernels.attention.plan.model import TileLoop


@dataclass(frozen=True)
class End:
    """Dependences of one end of a range."""

    moves: bool = False
    """True if the end depends on the tile of the outer index."""
    searches: bool = False
    """True if the end is a binary search in a sorted buffer."""
    reads_first: bool = False
    """True if a buffer is read at the first position of the tile. For a part, this may be past the
    end.
    """
    may_be_length: bool = False
    """True if an empty range may begin at the length of the inner tensor."""

    def __or__(self, other: End) -> End:
        return End(
            self.moves or other.moves,
            self.searches or other.searches,
            self.reads_first or other.reads_first,
            self.may_be_length or other.may_be_length,
        )

    @property
    def of_parts(self) -> bool:
        """True if computing the end for a part of a tile is cheap and tightens the range."""
        return self.moves and not self.searches and not self.reads_first


@dataclass(frozen=True)
class Ends:
    """Ends of the range of a loop with one span, and ends of the part that needs no mask."""

    lo: End
    hi: End
    full_lo: End
    full_hi: End
    has_full: bool
    """True if some tiles may need no mask."""

    @property
    def searches(self) -> bool:
        """True if any end is a binary search."""
        whole = self.lo.searches or self.hi.searches
        return whole or (self.has_full and (self.full_lo.searches or self.full_hi.searches))

    def from_first_key(self) -> Ends:
        """Return the ends of a range that begins at the first key of a search, not at a tile."""
        return replace(self, lo=End(), full_lo=End())


_FIXED = Ends(End(), End(), End(), End(), has_full=False)


def ends_of(loop: TileLoop) -> Ends:
    """Return the ends of a loop. The ends of listed blocks have no dependences."""
    if loop.listed:
        return _FIXED
    (span,) = loop.spans
    lo, hi, full_lo, full_hi = (
        _end(bound, loop) for bound in (span.lo, span.hi, span.full_lo, span.full_hi)
    )
    if span.lo != Const(0, Type.INT):
        full_lo = full_lo | lo  # full_lo is never before lo
    return Ends(lo, hi, full_lo, full_hi, span.has_full and loop.masked)


def _end(bound: Node, loop: TileLoop) -> End:
    start, last = loop.outer.start.name, loop.outer.last.name
    parts = [*walk(bound)]
    found = [part for part in parts if isinstance(part, Read)]
    chosen = [part for part in parts if isinstance(part, Call) and part.fn == "where"]
    return End(
        moves=bool({start, last} & variables(bound)),
        searches=any(read.buffer.endswith(FIRST_AT_LEAST) for read in found),
        reads_first=any(start in variables(read) for read in found),
        may_be_length=any(loop.inner.size in choice.args for choice in chosen),
    )
