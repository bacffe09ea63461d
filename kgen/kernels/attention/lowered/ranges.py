"""The loops of a kernel over tiles of the inner index: between the bounds of a mask's spans, or over what a block mask
lists."""

from __future__ import annotations

from typing import Any

from kgen.expr.nodes import FIRST_AT_LEAST, Const, Node, Read, Type, Var, walk
from kgen.expr.spans import Span
from kgen.kernels.attention.plan.block_mask import BlockMask
from kgen.kernels.attention.plan.model import TileLoop
from kgen.targets.code import (
    Assign,
    Code,
    Name,
    Statement,
    as_type,
    assign,
    atom,
    cdiv,
    load,
    maximum,
    minimum,
    over,
    row,
    text,
)
from kgen.targets.triton.printer import Printer

NO_LISTS: dict[str, Any] = {"list_params": [], "list_args": []}


def lists_of(inner: str) -> tuple[str, str, str]:
    """What a block mask calls its lists of blocks of keys (`kv`) or of queries (`q`), as FlexAttention does."""
    return f"{inner}_num_blocks", f"full_{inner}_num_blocks", f"{inner}_indices"


def searches_of(loop: TileLoop, printer: Printer) -> tuple[list[Statement], list[Span]]:
    """Searches of sorted buffers that the bounds of a loop ask for, two of one row at a time, and the spans
    over their results."""
    rows: dict[tuple[str, tuple[Node, ...]], list[Read]] = {}
    for node in (n for s in loop.spans for bound in (s.lo, s.hi, s.full_lo, s.full_hi) for n in walk(bound)):
        if isinstance(node, Read) and node.buffer.endswith(FIRST_AT_LEAST):
            searches = rows.setdefault((node.buffer, node.indices[:-1]), [])
            searches += [node] * (node not in searches)
    names: dict[Node, Var] = {}
    lines = list[Statement]()
    for searches in rows.values():
        for first, second in zip(searches[::2], [*searches[1::2], searches[-1]], strict=False):
            for node in (first, second):
                stem = node.buffer.removesuffix(FIRST_AT_LEAST)
                names.setdefault(node, Var(f"{stem}_first_{len(names)}", Type.INT))
            other = names[second].name if first != second else "_"
            lines.append(Assign((names[first].name, other), (printer.search(first, second),)))
    found = dict[Node, Node](names)
    return lines, [span.over(found) for span in loop.spans]


def span_loops(
    span: Span, loop: TileLoop, printer: Printer, divisible: bool, first: bool, last: bool
) -> dict[str, Any]:
    """Tile-aligned loop bounds of one span, and the loops between them; `divisible`: no tile is cut by the length."""
    x = loop.inner.index.name.removesuffix("_idx")
    block, size = Name("BLOCK_N" if x == "kv" else "BLOCK_M"), loop.inner.size
    lo_name, hi, done = Name(f"{x}_lo"), Name(f"{x}_hi"), Name(f"{x}_done")
    lines: list[Statement] = []

    def down(node: Node) -> Code:
        return in_tiles(over(atom(printer.position(node)), block), block)

    # What the span before this one has visited is done.
    lo: Code = text("0") if first else done
    if span.lo != Const(0, Type.INT):
        lo = down(span.lo) if first else maximum(down(span.lo), done)
    if not first or span.lo != Const(0, Type.INT):
        lines.append(assign(lo_name.name, lo))
        lo = lo_name
    lines.append(assign(hi.name, printer.position(span.hi)))
    if not last:
        behind: Code = in_tiles(cdiv(hi, block), block)
        if lo == lo_name:
            behind = end_of(lo, hi, behind, text("0") if first else done)
        lines.append(assign(done.name, behind))
    if not span.has_full or not loop.masked:
        return {"bounds": lines, "loops": [{"lo": lo, "hi": hi, "masked": loop.masked}]}
    full_lo, full_hi = lo, Name(f"{x}_full_hi")
    from_start = span.full_lo == span.lo == Const(0, Type.INT) and first
    if not from_start:
        aligned: Code = in_tiles(cdiv(printer.position(span.full_lo), block), block)
        full_lo = Name(f"{x}_full_lo")
        lines.append(assign(full_lo.name, maximum(aligned, lo) if lo == lo_name else aligned))
    if span.full_hi == span.hi == size and divisible:
        head = {"lo": lo, "hi": minimum(full_lo, hi), "masked": True}
        rest = {"lo": full_lo, "hi": hi, "masked": False}
        return {"bounds": lines, "loops": [rest] if from_start else [head, rest]}
    lines.append(assign(full_hi.name, down(span.full_hi)))
    full = {"lo": full_lo, "hi": full_hi, "masked": False}
    if from_start:
        return {"bounds": lines, "loops": [full, {"lo": full_hi, "hi": hi, "masked": True}]}
    gap = Name(f"{x}_gap")
    lines.append(assign(gap.name, maximum(row("sub", full_hi, full_lo), 0)))
    ends = {"lo": lo, "hi": hi, "masked": True, "gap": (full_lo, gap)}
    return {"bounds": lines, "loops": [ends, full]}


def end_of(lo: Code, hi: Code, end: Code, before: Code) -> Code:
    """The first tile that a later span may visit: `end`, or `before` if this span is empty.

    The start of an empty span can be any position, also one behind the tiles of later spans.
    """
    return row("where", row("lt", lo, hi), end, before)


def in_tiles(number: Code, block: Code) -> Code:
    """The position of a tile by its number."""
    return row("mul", number, block)


def range_fields(loop: TileLoop, outer: str, inner: str, gapped: bool) -> dict[str, Any]:
    """What a tile function is told of the tiles to visit, and the lists that its kernel takes."""
    words = {"q": "query", "kv": "KV"}[inner]
    if not loop.listed:
        names = [f"{inner}_lo", f"{inner}_hi", *["turn"] * loop.rotated, *["gap_lo", "gap"] * gapped]
        visited = f"{words} tiles of [{inner}_lo, {inner}_hi)"
        return {"range_params": names, "visited": visited} | NO_LISTS
    lists = lists_of(inner)
    return {
        "range_params": [f"{inner}_blocks", "n_blocks"],
        "visited": f"{words} tiles of n_blocks listed blocks",
        "list_params": [f"{n}_ptr" for n in lists],
        "list_args": list(lists),
    }


def listed_loops(block_mask: BlockMask, loop: TileLoop) -> dict[str, Any]:
    """The loops over what the block mask lists for a tile: blocks with the mask, and blocks without it."""
    outer, inner = (axis.index.name.removesuffix("_idx") for axis in (loop.outer, loop.inner))
    num_blocks, full_num_blocks, indices = (f"{n}_ptr" for n in lists_of(inner))
    head = {
        (True, True): row("add", row("mul", "b", "HQ"), "h"),
        (True, False): Name("b"),
        (False, True): Name("h"),
        (False, False): None,
    }
    plane = head[block_mask.by_batch, block_mask.by_head]
    blocks = {x: cdiv(f"S{x[0].upper()}", "BLOCK_SIZE") for x in ("q", "kv")}
    own: Code = over(loop.outer.start.name, "BLOCK_SIZE")
    if plane is not None:
        own = row("add", row("mul", plane, blocks[outer]), own)
    first = row("mul", as_type(Name("row"), "int64"), blocks[inner])
    lines = [
        assign("row", own),
        Assign(
            ("n_partial", "n_full"), tuple(load(row("add", n, "row")) for n in (num_blocks, full_num_blocks))
        ),
        assign(f"{inner}_blocks", row("add", indices, first)),
    ]
    listed = Name(f"{inner}_blocks")
    return {
        "bounds": lines,
        "loops": [
            {"lo": listed, "hi": Name("n_partial"), "masked": loop.masked},
            {"lo": row("add", listed, "n_partial"), "hi": Name("n_full"), "masked": False},
        ],
    }
