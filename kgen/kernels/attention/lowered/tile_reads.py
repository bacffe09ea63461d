"""Reads of buffers per pair of a tile, in Triton.

The addresses of rows are computed before the loop. If all pairs read one element, it is read once.
"""

from __future__ import annotations

from dataclasses import replace

from kgen.expr.hoist import TILE, Binding
from kgen.expr.nodes import Read, Type, Var
from kgen.kernels.attention.plan.model import TileLoop
from kgen.kernels.attention.plan.tile_reads import element_bounds
from kgen.targets.code import If, Name, Statement, assign, op, renamed, row
from kgen.targets.triton.printer import Printer


def read_by_rows(
    binding: Binding, loop: TileLoop, printer: Printer
) -> tuple[list[Statement], list[Statement]] | None:
    """Return the addresses before the loop and the loads inside it, for a read indexed by the
    loop's index.

    In tiles without a mask, the loads have guards for the outer index only. Return None for other
    reads.
    """
    read, inner, place = binding.node, loop.inner.index, loop.program.place
    if not (
        isinstance(read, Read)
        and binding.place == TILE
        and loop.masked
        and read.indices.count(inner) == 1
    ):
        return None
    if any(place(index).in_loop for index in read.indices if index != inner):
        return None
    axes, side = printer.axes, inner.name.removesuffix("_idx")
    whole = {**printer.ranges.greatest, inner.name: {loop.inner.size.name: 1, "": -1}}
    unmasked = replace(printer, ranges=replace(printer.ranges, greatest=whole))
    offsets = Name({"kv": "offs_n", "q": "offs_m"}[side])
    rows = renamed(printer.address(read.buffer, read.indices, axes), {inner.name: offsets})
    stride = f"stride_{read.buffer}_{read.indices.index(inner)}"
    at = row("add", f"{binding.name}_rows", row("mul", f"{side}_start", stride))
    masked, full = (
        assign(
            binding.name, printer.loaded(read.buffer, at, p.guard(read.buffer, read.indices, axes))
        )
        for p in (printer, unmasked)
    )
    lines: list[Statement] = [full] if masked == full else [If(Name("MASKED"), (masked,), (full,))]
    return [assign(f"{binding.name}_rows", rows)], lines


def read_once(
    binding: Binding, loop: TileLoop, printer: Printer, lines: list[Statement]
) -> list[Statement]:
    """Add a branch to the `lines` of a read: if all pairs of a tile read one element, load and
    broadcast it.

    Return `lines` unchanged if the read has no bounds within a tile.
    """
    read, bounds = binding.node, element_bounds(binding, loop)
    if not isinstance(read, Read) or not bounds:
        return lines
    indices, before, same = list(read.indices), list[Statement](), None
    for dim, ends in bounds.items():
        least, most = (
            f"{binding.name}_{end}{f'_{dim}' if same else ''}" for end in ("least", "most")
        )
        before += [
            assign(name, printer.own(end)) for name, end in zip((least, most), ends, strict=True)
        ]
        equal = row("eq", least, most)
        same = equal if same is None else op("{0} and {1}", same, equal)
        indices[dim] = Var(least, Type.INT)
    assert same is not None
    at = tuple(indices)
    guarded = printer.guard(read.buffer, read.indices, printer.axes)
    guard = printer.guard(read.buffer, at, ()) if guarded is not None else None
    one = printer.loaded(read.buffer, printer.address(read.buffer, at, ()), guard)
    rows, columns = (
        loop.outer.index.name,
        "BLOCK_N" if loop.inner.index.name == "kv_idx" else "BLOCK_M",
    )
    everywhere = op("{tl}.broadcast_to({0}, [{1}.shape[0], {2}])", one, rows, columns)
    note = "all pairs of the tile read one element"
    return [*before, If(same, (assign(binding.name, everywhere),), tuple(lines), note)]
