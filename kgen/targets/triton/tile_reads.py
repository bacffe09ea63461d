"""How a tile of scores reads a buffer for each of its pairs: by rows whose addresses are made ahead of the loop, and
once for all pairs where they read one element."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from kgen.expr.algebra import call
from kgen.expr.hoist import TILE, Binding
from kgen.expr.nodes import Const, Node, Read, Type, Var, substitute, variables, walk
from kgen.expr.softmax_form import QK
from kgen.expr.tile_bounds import tile_bounds
from kgen.plan.attention import TileLoop
from kgen.targets.triton.printer import Printer


def read_by_rows(binding: Binding, loop: TileLoop, printer: Printer) -> tuple[list[str], list[str]] | None:
    """How a tile of a buffer is read that has the loop's index as one of its own: addresses of its first tile,
    before the loop, and the loads in it, which in tiles without a mask ask only for what exists of the outer index.
    None for any other read."""
    read, inner, place = binding.node, loop.inner.index, loop.program.place
    if not (
        isinstance(read, Read) and binding.place == TILE and loop.masked and read.indices.count(inner) == 1
    ):
        return None
    if any(place(index).in_loop for index in read.indices if index != inner):
        return None
    axes, side = printer.axes, inner.name.removesuffix("_idx")
    whole = {**printer.ranges.greatest, inner.name: {loop.inner.size.name: 1, "": -1}}
    unmasked = replace(printer, ranges=replace(printer.ranges, greatest=whole))
    offsets = {"kv": "offs_n", "q": "offs_m"}[side]
    rows = re.sub(rf"\b{inner.name}\b", offsets, printer.address(read.buffer, read.indices, axes))
    at = f"{binding.name}_rows + {side}_start * stride_{read.buffer}_{read.indices.index(inner)}"
    masked, full = (
        printer.loaded(read.buffer, at, p.guard(read.buffer, read.indices, axes))[0]
        for p in (printer, unmasked)
    )
    lines = [f"{binding.name} = {full}"]
    if masked != full:
        lines = ["if MASKED:", f"    {binding.name} = {masked}", "else:", f"    {binding.name} = {full}"]
    return [f"{binding.name}_rows = {rows}"], lines


def read_once(binding: Binding, loop: TileLoop, printer: Printer, lines: list[str]) -> list[str]:
    """The `lines` that read a tile, for those tiles alone whose pairs do not all read one element, if it is known of
    any that they do."""
    read = binding.node
    if not isinstance(read, Read) or binding.place != TILE:
        return lines
    ends, definitions = _ends(loop), _definitions(loop)
    indices, bounds_lines, same = list(read.indices), list[str](), list[str]()
    for dim, index in enumerate(read.indices):
        whole = substitute(index, definitions)
        if not any(node in ends for node in walk(whole)):
            continue
        bounds = tile_bounds(whole, ends)
        if bounds is None:
            return lines
        low, high = (f"{binding.name}_{end}{f'_{dim}' if same else ''}" for end in ("least", "most"))
        bounds_lines += [
            f"{name} = {printer.own(bound)}" for name, bound in zip((low, high), bounds, strict=True)
        ]
        same.append(f"{low} == {high}")
        indices[dim] = Var(low, Type.INT)
    at = tuple(indices)
    guarded = printer.guard(read.buffer, read.indices, printer.axes)
    guard = printer.guard(read.buffer, at, ()) if guarded else ""
    one, _ = printer.loaded(read.buffer, printer.address(read.buffer, at, ()), guard)
    return [
        *bounds_lines,
        f"if {' and '.join(same)}:  # all pairs of the tile read one element",
        f"    {binding.name} = tl.broadcast_to({one}, [{loop.outer.index.name}.shape[0], {_block(loop)}])",
        "else:",
        *(f"    {line}" for line in lines),
    ]


def asked_ahead(bindings: Iterable[Binding]) -> frozenset[str]:
    """Which values of a tile are asked for ahead of its product, lest both be waited for in turn: what is read for each
    pair, and what that needs, unless it needs the product."""
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


def _block(loop: TileLoop) -> str:
    return "BLOCK_N" if loop.inner.index.name == "kv_idx" else "BLOCK_M"


def _ends(loop: TileLoop) -> dict[Node, tuple[Node, Node]]:
    """The first and last position of a tile along each side."""
    inner, outer = loop.inner, loop.outer
    last = call("sub", call("add", inner.start, Var(_block(loop), Type.INT)), Const(1, Type.INT))
    return {inner.index: (inner.start, last), outer.index: (outer.start, outer.last)}


def _definitions(loop: TileLoop) -> dict[Node, Node]:
    """What names that differ within a tile stand for, in terms of positions."""
    found: dict[Node, Node] = {}
    for binding in loop.program.bindings:
        if binding.place.axes:
            found[Var(binding.name, binding.node.type)] = substitute(binding.node, found)
    return found
