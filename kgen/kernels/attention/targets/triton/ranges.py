"""The loops of a kernel over tiles of the inner index: between the bounds of a mask's spans, or over what a block mask
lists."""

from __future__ import annotations

from typing import Any

from kgen.expr.nodes import Const, Node, Read, Type, Var, walk
from kgen.expr.tile_ranges import FIRST_AT_LEAST, Span
from kgen.kernels.attention.plan.block_mask import BlockMask
from kgen.kernels.attention.plan.planning import TileLoop
from kgen.targets.triton.printer import Printer
from kgen.targets.triton.text import bracketed, value_of

NO_LISTS = {"list_params": "", "list_args": ""}


def lists_of(inner: str) -> tuple[str, str, str]:
    """What a block mask calls its lists of blocks of keys (`kv`) or of queries (`q`), as FlexAttention does."""
    return f"{inner}_num_blocks", f"full_{inner}_num_blocks", f"{inner}_indices"


def searches_of(loop: TileLoop, printer: Printer) -> tuple[list[str], list[Span]]:
    """Searches of sorted buffers that the bounds of a loop ask for, two of one row at a time, and the spans
    over their results."""
    rows: dict[tuple[str, tuple[Node, ...]], list[Read]] = {}
    for node in (n for s in loop.spans for bound in (s.lo, s.hi, s.full_lo, s.full_hi) for n in walk(bound)):
        if isinstance(node, Read) and node.buffer.endswith(FIRST_AT_LEAST):
            searches = rows.setdefault((node.buffer, node.indices[:-1]), [])
            searches += [node] * (node not in searches)
    names: dict[Node, Var] = {}
    lines = []
    for searches in rows.values():
        for first, second in zip(searches[::2], [*searches[1::2], searches[-1]], strict=False):
            for node in (first, second):
                stem = node.buffer.removesuffix(FIRST_AT_LEAST)
                names.setdefault(node, Var(f"{stem}_first_{len(names)}", Type.INT))
            other = names[second].name if first != second else "_"
            lines.append(f"{names[first].name}, {other} = {printer.search(first, second)}")
    found = dict[Node, Node](names)
    return lines, [span.over(found) for span in loop.spans]


def span_loops(
    span: Span, loop: TileLoop, printer: Printer, divisible: bool, first: bool, last: bool
) -> dict[str, Any]:
    """Tile-aligned loop bounds of one span, and the loops between them; `divisible`: no tile is cut by the length."""
    x = loop.inner.index.name.removesuffix("_idx")
    block = "BLOCK_N" if x == "kv" else "BLOCK_M"
    size = loop.inner.size
    lines: list[str] = []
    lo = "0"
    if span.lo != Const(0, Type.INT):
        lines.append(f"{x}_lo = {bracketed(printer.position(span.lo))} // {block} * {block}")
        lo = f"{x}_lo"
    if not first:
        # What the span before this one has visited is done.
        lines[-1:] = (
            [f"{x}_lo = tl.maximum({value_of(lines[-1])}, {x}_done)"] if lo != "0" else [f"{x}_lo = {x}_done"]
        )
        lo = f"{x}_lo"
    lines.append(f"{x}_hi = {printer.position(span.hi)}")
    if not last:
        lines.append(f"{x}_done = tl.cdiv({x}_hi, {block}) * {block}")
    if not span.has_full or not loop.masked:
        return {"bounds": lines, "loops": [{"lo": lo, "hi": f"{x}_hi", "masked": loop.masked}]}
    full_lo, full_hi = lo, f"{x}_full_hi"
    from_start = span.full_lo == span.lo == Const(0, Type.INT) and first
    if not from_start:
        aligned = f"tl.cdiv({printer.position(span.full_lo)}, {block}) * {block}"
        lines.append(f"{x}_full_lo = {f'tl.maximum({aligned}, {lo})' if lo != '0' else aligned}")
        full_lo = f"{x}_full_lo"
    if span.full_hi == span.hi == size and divisible:
        head = {"lo": lo, "hi": f"tl.minimum({full_lo}, {x}_hi)", "masked": True}
        rest = {"lo": full_lo, "hi": f"{x}_hi", "masked": False}
        return {"bounds": lines, "loops": [rest] if from_start else [head, rest]}
    lines.append(f"{x}_full_hi = {bracketed(printer.position(span.full_hi))} // {block} * {block}")
    full = {"lo": full_lo, "hi": full_hi, "masked": False}
    if from_start:
        return {"bounds": lines, "loops": [full, {"lo": full_hi, "hi": f"{x}_hi", "masked": True}]}
    lines.append(f"{x}_gap = tl.maximum({full_hi} - {full_lo}, 0)")
    ends = {"lo": lo, "hi": f"{x}_hi", "masked": True, "gap": f"{full_lo}, {x}_gap"}
    return {"bounds": lines, "loops": [ends, full]}


def range_fields(loop: TileLoop, outer: str, inner: str, gapped: bool) -> dict[str, str]:
    """What a tile function is told of the tiles to visit, and the lists that its kernel takes."""
    words = {"q": "query", "kv": "KV"}[inner]
    if not loop.listed:
        names = [f"{inner}_lo", f"{inner}_hi", *["turn"] * loop.rotated, *["gap_lo", "gap"] * gapped]
        visited = f"{words} tiles of [{inner}_lo, {inner}_hi)"
        return {"range_params": "".join(f"{n}, " for n in names), "visited": visited} | NO_LISTS
    lists = lists_of(inner)
    return {
        "range_params": f"{inner}_blocks, n_blocks, ",
        "visited": f"{words} tiles of n_blocks listed blocks",
        "list_params": "".join(f"{n}_ptr, " for n in lists),
        "list_args": "".join(f"{n}, " for n in lists),
    }


def listed_loops(block_mask: BlockMask, loop: TileLoop) -> dict[str, Any]:
    """The loops over what the block mask lists for a tile: blocks with the mask, and blocks without it."""
    outer, inner = (axis.index.name.removesuffix("_idx") for axis in (loop.outer, loop.inner))
    num_blocks, full_num_blocks, indices = (f"{n}_ptr" for n in lists_of(inner))
    head = {(True, True): "(b * HQ + h)", (True, False): "b", (False, True): "h", (False, False): ""}
    plane = head[block_mask.by_batch, block_mask.by_head]
    blocks = {"q": "tl.cdiv(SQ, BLOCK_SIZE)", "kv": "tl.cdiv(SK, BLOCK_SIZE)"}
    own = f"{loop.outer.start.name} // BLOCK_SIZE"
    lines = [
        f"row = {plane} * {blocks[outer]} + {own}" if plane else f"row = {own}",
        f"n_partial, n_full = tl.load({num_blocks} + row), tl.load({full_num_blocks} + row)",
        f"{inner}_blocks = {indices} + row.to(tl.int64) * {blocks[inner]}",
    ]
    listed = f"{inner}_blocks"
    return {
        "bounds": lines,
        "loops": [
            {"lo": listed, "hi": "n_partial", "masked": loop.masked},
            {"lo": f"{listed} + n_partial", "hi": "n_full", "masked": False},
        ],
    }
