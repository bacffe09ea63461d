"""How Triton spells what a tile of scores reads for each of its pairs: by rows whose addresses are made ahead of the
loop, and once for all pairs where they read one element."""

from __future__ import annotations

import re
from dataclasses import replace

from kgen.expr.hoist import TILE, Binding
from kgen.expr.nodes import Read, Type, Var
from kgen.kernels.attention.plan.planning import TileLoop
from kgen.kernels.attention.plan.tile_reads import element_bounds
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
    read, bounds = binding.node, element_bounds(binding, loop)
    if not isinstance(read, Read) or not bounds:
        return lines
    indices, before, same = list(read.indices), list[str](), list[str]()
    for dim, ends in bounds.items():
        least, most = (f"{binding.name}_{end}{f'_{dim}' if same else ''}" for end in ("least", "most"))
        before += [f"{name} = {printer.own(end)}" for name, end in zip((least, most), ends, strict=True)]
        same.append(f"{least} == {most}")
        indices[dim] = Var(least, Type.INT)
    at = tuple(indices)
    guarded = printer.guard(read.buffer, read.indices, printer.axes)
    guard = printer.guard(read.buffer, at, ()) if guarded else ""
    one, _ = printer.loaded(read.buffer, printer.address(read.buffer, at, ()), guard)
    rows, columns = loop.outer.index.name, "BLOCK_N" if loop.inner.index.name == "kv_idx" else "BLOCK_M"
    return [
        *before,
        f"if {' and '.join(same)}:  # all pairs of the tile read one element",
        f"    {binding.name} = tl.broadcast_to({one}, [{rows}.shape[0], {columns}])",
        "else:",
        *(f"    {line}" for line in lines),
    ]
