"""What kernels for a chip have a better way for, found in the program of a loop: a bias that is linear in the position,
and documents of a sorted buffer."""

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
    """What a loop over keys has that is better done otherwise."""

    bias: LinearBias | None = None
    documents: Documents | None = None


@dataclass(frozen=True)
class LinearBias:
    """A bias of a row's logits: slope * (distance + column of the tile), added to the scores times scale."""

    slope: Var
    distance: Node
    scale: Var


def linear_bias(loop: TileLoop) -> LinearBias | None:
    """The bias of a loop over keys that adds nothing else, if it grows by the same from key to key."""
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
    """The slope of what the log-sum-exp of a query gets back, in a loop over queries, where that is slope * (first
    query of the tile - query)."""
    rest = loop.program.results.get("row_rest")
    if not isinstance(rest, Call) or rest.fn != "mul":
        return None
    slope, moved = rest.args
    return slope if moved == Call("sub", (loop.inner.start, loop.inner.index), Type.INT) else None


@dataclass(frozen=True)
class Documents:
    """A causal range over the keys of a document, in a sorted buffer that the mask compares, and nothing else that it
    reads: a query sees itself."""

    first: Read
    """A search for the document of the first query of a tile."""
    last: Read
    """The same for the last."""
    of_keys: Binding
    """What loads the documents of a tile of keys."""
    same: Node
    """The part of the mask that compares documents."""


def documents(loop: TileLoop) -> Documents | None:
    """The documents of a loop over keys; None where its range or its mask is another."""
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
    if of_first.indices[:-1] != of_last.indices[:-1] or not all(isinstance(v, Read) for v in values):
        return None
    buffer, heads = of_first.buffer.removesuffix(FIRST_AT_LEAST), of_first.indices[:-1]
    program = loop.program
    reads = [b for b in program.in_loop(needed_by=("mask", "inner_live")) if isinstance(b.node, Read)]
    if len(reads) != 1 or reads[0].node != Read(buffer, (*heads, KV_IDX), reads[0].node.type):
        return None
    (of_keys,) = reads
    of_queries = [
        b.name for b in program.bindings if b.node == Read(buffer, (*heads, Q_IDX), of_keys.node.type)
    ]
    for part in conjuncts(program.results["mask"]):
        sides = {n.name for n in part.args if isinstance(n, Var)} if isinstance(part, Call) else set()
        if isinstance(part, Call) and part.fn == "eq" and sides == {of_keys.name, *of_queries}:
            return Documents(of_first, of_last, of_keys, part)
    return None


def _search(bound: Node) -> Read | None:
    """The search in max(search, 0)."""
    if not isinstance(bound, Call) or bound.fn != "max" or bound.args[1] != ZERO:
        return None
    read = bound.args[0]
    return read if isinstance(read, Read) and read.buffer.endswith(FIRST_AT_LEAST) else None
