"""Reads of buffers for each pair of a tile: reads of a single element, and loads that start before
Q @ K^T.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kgen.expr.algebra import call
from kgen.expr.hoist import TILE, Binding
from kgen.expr.nodes import Const, Node, Read, Type, Var, substitute, variables, walk
from kgen.expr.softmax_form import QK
from kgen.expr.tile_bounds import Bounds, tile_bounds
from kgen.kernels.attention.plan.model import TileLoop


def element_bounds(binding: Binding, loop: TileLoop) -> Mapping[int, Bounds]:
    """Return the least and greatest value in a tile of each index that varies in it, by dimension.

    If the two are equal, all pairs of the tile read one element. The mapping is empty if `binding`
    is not a read per pair, or if an index has no such bounds.
    """
    read = binding.node
    if not isinstance(read, Read) or binding.place != TILE:
        return {}
    ends, definitions = _ends(loop), _definitions(loop)
    found: dict[int, Bounds] = {}
    for dim, index in enumerate(substitute(i, definitions) for i in read.indices):
        if not any(node in ends for node in walk(index)):
            continue
        bounds = tile_bounds(index, ends)
        if bounds is None:
            return {}
        found[dim] = bounds
    return found


def asked_ahead(bindings: Iterable[Binding]) -> frozenset[str]:
    """Return the values to load before the product Q @ K^T, so that the load and the product
    overlap.

    These are the reads per pair and the values that they need. Reads that depend on the product are
    excluded.
    """
    known = {b.name: b for b in bindings}

    def needed(binding: Binding) -> frozenset[str]:
        others = variables(binding.node) & known.keys()
        return frozenset({binding.name}).union(*(needed(known[name]) for name in others))

    ahead: frozenset[str] = frozenset()
    for binding in known.values():
        if isinstance(binding.node, Read) and binding.place == TILE:
            names = needed(binding)
            scored = any(QK.name in variables(known[name].node) for name in names)
            ahead |= frozenset() if scored else names
    return ahead


def mask_reads(loop: TileLoop) -> Mapping[str, str]:
    """Return the reads of the mask that depend on the inner index only: names of elements, with
    their buffers.
    """
    inner = loop.inner.index.name.removesuffix("_idx")
    return {
        b.name: b.node.buffer
        for b in loop.program.in_loop(needed_by=("mask", "inner_live"))
        if isinstance(b.node, Read) and b.place.axes == (inner,)
    }


def _ends(loop: TileLoop) -> dict[Node, Bounds]:
    """Return the first and last position of a tile along each axis.

    The inner axis counts a whole tile.
    """
    inner, outer = loop.inner, loop.outer
    block = Var("BLOCK_N" if inner.index.name == "kv_idx" else "BLOCK_M", Type.INT)
    last = call("sub", call("add", inner.start, block), Const(1, Type.INT))
    return {inner.index: (inner.start, last), outer.index: (outer.start, outer.last)}


def _definitions(loop: TileLoop) -> dict[Node, Node]:
    """Return the definitions of names that vary within a tile, in terms of positions."""
    found: dict[Node, Node] = {}
    for binding in loop.program.bindings:
        if binding.place.axes:
            found[Var(binding.name, binding.node.type)] = substitute(binding.node, found)
    return found
