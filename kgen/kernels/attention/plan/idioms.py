"""Idioms in the program of a loop that a chip computes in a better way: linear biases and sorted
documents.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.expr.hoist import Binding
from kgen.expr.mask_form import conjuncts
from kgen.expr.nodes import FIRST_AT_LEAST, Call, Const, Node, Read, Type, Var
from kgen.expr.softmax_form import KV_IDX, Q_IDX, QK
from kgen.kernels.attention.plan.model import OFFS_N, TileLoop

ZERO, ONE = Const(0, Type.INT), Const(1, Type.INT)


@dataclass(frozen=True)
class Idioms:
    """The idioms of a loop over keys."""

    bias: LinearBias | None = None
    """The linear bias, if the loop adds no other bias."""
    documents: Documents | None = None
    """The sorted documents, if they are the whole mask."""


@dataclass(frozen=True)
class LinearBias:
    """A bias that grows linearly along a row: logit = qk * scale + slope * (distance + column of
    the tile).

    ALiBi (Press et al., "Train Short, Test Long", section 3) has this form.
    """

    slope: Var
    """The growth from key to key, one number per head."""
    distance: Node
    """The value at column 0 of the tile, in units of `slope`."""
    scale: Var
    """The factor of qk."""


def linear_bias(loop: TileLoop) -> LinearBias | None:
    """Return the linear bias of a loop over keys. None if the loop computes any other score."""
    program, found = loop.program, loop.program.results
    columns = {
        b.name: b.node.args[0]
        for b in program.before_loop()
        if isinstance(b.node, Call) and b.node.fn == "mul" and b.node.args[1] == OFFS_N
    }
    in_loop = program.in_loop(without=("mask", "inner_live"))
    scale, bias = found["qk_scale"], found.get("bias")
    if found["core"] != QK or not isinstance(scale, Var) or len(columns) != 1 or len(in_loop) != 1:
        return None
    ((column, slope),), (whole,) = columns.items(), in_loop
    if not isinstance(slope, Var) or bias != Var(whole.name, Type.FLOAT):
        return None
    if (
        not isinstance(whole.node, Call)
        or whole.node.fn != "add"
        or whole.node.args[0] != Var(column, Type.FLOAT)
    ):
        return None
    rest = whole.node.args[1]
    if not isinstance(rest, Call) or rest.fn != "mul" or rest.args[0] != slope:
        return None
    return None if program.place(rest.args[1]).axes else LinearBias(slope, rest.args[1], scale)


def linear_rest(loop: TileLoop) -> Node | None:
    """Return the slope in the `row_rest` of a loop over queries.

    None unless `row_rest` is slope * (first query of the tile - query).
    """
    rest = loop.program.results.get("row_rest")
    if not isinstance(rest, Call) or rest.fn != "mul":
        return None
    slope, moved = rest.args
    return slope if moved == Call("sub", (loop.inner.start, loop.inner.index), Type.INT) else None


@dataclass(frozen=True)
class Documents:
    """A causal mask within documents, whose numbers are in a sorted buffer.

    The mask reads no other buffer, and every query sees itself.
    """

    first: Read
    """The search for the document of the first query of a tile."""
    last: Read
    """The search for the document of the last query of a tile."""
    of_keys: Binding
    """The load of the documents of a tile of keys."""
    same: Node
    """The part of the mask that compares documents."""


def documents(loop: TileLoop) -> Documents | None:
    """Return the documents of a loop over keys. None if its range or its mask has another form."""
    if len(loop.spans) != 1:
        return None
    (span,) = loop.spans
    start, last, size = loop.outer.start, loop.outer.last, loop.inner.size

    def up_to(position: Var) -> Node:
        return Call("min", (Call("add", (position, ONE), Type.INT), size), Type.INT)

    if span.hi != up_to(last) or span.full_hi != up_to(start):
        return None
    searches = [_search(bound) for bound in (span.lo, span.full_lo)]
    of_first, of_last = searches
    if of_first is None or of_last is None or of_first.buffer != of_last.buffer:
        return None
    values = of_first.indices[-1], of_last.indices[-1]
    if of_first.indices[:-1] != of_last.indices[:-1] or not all(
        isinstance(v, Read) for v in values
    ):
        return None
    buffer, heads = of_first.buffer.removesuffix(FIRST_AT_LEAST), of_first.indices[:-1]
    program = loop.program
    reads = [
        b for b in program.in_loop(needed_by=("mask", "inner_live")) if isinstance(b.node, Read)
    ]
    if len(reads) != 1 or reads[0].node != Read(buffer, (*heads, KV_IDX), reads[0].node.type):
        return None
    (of_keys,) = reads
    of_queries = [
        b.name
        for b in program.bindings
        if b.node == Read(buffer, (*heads, Q_IDX), of_keys.node.type)
    ]
    for part in conjuncts(program.results["mask"]):
        sides = (
            {n.name for n in part.args if isinstance(n, Var)} if isinstance(part, Call) else set()
        )
        if isinstance(part, Call) and part.fn == "eq" and sides == {of_keys.name, *of_queries}:
            return Documents(of_first, of_last, of_keys, part)
    return None


def _search(bound: Node) -> Read | None:
    """Return the search in `max(search, 0)`, or None."""
    if not isinstance(bound, Call) or bound.fn != "max" or bound.args[1] != ZERO:
        return None
    read = bound.args[0]
    return read if isinstance(read, Read) and read.buffer.endswith(FIRST_AT_LEAST) else None
