"""The loops of a kernel over tiles of the inner index: over spans, or over the lists of a block
mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kgen.expr.mask_form import TRUE
from kgen.expr.nodes import FIRST_AT_LEAST, Const, Node, Read, Type, Var, walk
from kgen.expr.spans import Span
from kgen.kernels.attention.lowered.model import KEYS, Param, Part, Ranges, SpanLoops, side_of
from kgen.kernels.attention.plan.block_mask import BlockMask
from kgen.kernels.attention.plan.model import AttentionPlan, TileLoop
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

_TURN_WORDS = "Without TMA, begin at `turn`."
_GAP_WORDS = "Skip [gap_lo, gap_lo + gap): another call visits these tiles, without a mask."


def lists_of(inner: str) -> tuple[str, str, str]:
    """Return the names of a block mask's lists of blocks of keys (`kv`) or queries (`q`), as in
    FlexAttention.
    """
    return f"{inner}_num_blocks", f"full_{inner}_num_blocks", f"{inner}_indices"


def searches_of(loop: TileLoop, printer: Printer) -> tuple[list[Statement], list[Span]]:
    """Return the searches of sorted buffers for a loop's bounds, and the spans in terms of their
    results.

    One statement searches for two values of a row.
    """
    rows: dict[tuple[str, tuple[Node, ...]], list[Read]] = {}
    for node in (
        n for s in loop.spans for bound in (s.lo, s.hi, s.full_lo, s.full_hi) for n in walk(bound)
    ):
        if isinstance(node, Read) and node.buffer.endswith(FIRST_AT_LEAST):
            searches = rows.setdefault((node.buffer, node.indices[:-1]), [])
            if node not in searches:
                searches.append(node)
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


def ranges_of(
    plan: AttentionPlan, loop: TileLoop, printer: Printer, known: Mapping[Node, Node]
) -> Ranges:
    """Return the tiles that a loop visits.

    `known` maps the reads that its kernel has done to their names.
    """
    searches = list[Statement]()
    if loop.listed:
        assert plan.block_mask is not None
        spans = [listed_loops(plan.block_mask, loop)]
    else:
        searches, found = searches_of(loop, printer)
        divisible = (plan.kv if side_of(loop.inner) is KEYS else plan.q).bound == TRUE
        spans = [
            span_loops(span.over(known), loop, printer, divisible, i == 0, i == len(found) - 1)
            for i, span in enumerate(found)
        ]
    if side_of(loop.outer) is KEYS:
        # The searched value may depend on the query head.
        spans[0] = replace(spans[0], bounds=[*searches, *spans[0].bounds])
        searches = []
    gapped = any(part.gap is not None for span in spans for part in span.loops)
    return Ranges(
        spans=tuple(
            replace(span, loops=[_told(part, loop, gapped) for part in span.loops])
            for span in spans
        ),
        searches=searches,
        listed=loop.listed,
        rotated=loop.rotated,
        gapped=gapped,
        range_params=_range_params(loop, gapped),
        visited=_visited(loop),
        turn_words=_TURN_WORDS if loop.rotated else None,
        gap_words=_GAP_WORDS if gapped else None,
        lists=_lists(loop),
    )


def _told(part: Part, loop: TileLoop, gapped: bool) -> Part:
    """Add the further arguments of a loop's function: the first tile, and the gap."""
    rotates = loop.rotated and (not part.masked or not any(s.has_full for s in loop.spans))
    turn = [Name("tile" if rotates else "0")] if loop.rotated else []
    gap = (part.gap or (text("0"), text("0"))) if gapped else ()
    return replace(part, options=(*turn, *gap))


def _range_params(loop: TileLoop, gapped: bool) -> list[str]:
    """Return the parameters of a loop's function for the tiles to visit."""
    inner = side_of(loop.inner).name
    if loop.listed:
        return [f"{inner}_blocks", "n_blocks"]
    turn = ["turn"] if loop.rotated else []
    gap = ["gap_lo", "gap"] if gapped else []
    return [f"{inner}_lo", f"{inner}_hi", *turn, *gap]


def _visited(loop: TileLoop) -> str:
    inner = side_of(loop.inner)
    of = "n_blocks listed blocks" if loop.listed else f"[{inner.name}_lo, {inner.name}_hi)"
    return f"{inner.words} tiles of {of}"


def _lists(loop: TileLoop) -> tuple[Param, ...]:
    if not loop.listed:
        return ()
    return tuple(Param(f"{name}_ptr", name) for name in lists_of(side_of(loop.inner).name))


def span_loops(
    span: Span, loop: TileLoop, printer: Printer, divisible: bool, first: bool, last: bool
) -> SpanLoops:
    """Return the tile-aligned loop bounds of one span, and the loops between them.

    `divisible` means that the length is a multiple of the tile. `first` and `last` are the span's
    position.
    """
    inner, size = side_of(loop.inner), loop.inner.size
    x, block = inner.name, Name(inner.block)
    lo_name, hi, done = Name(f"{x}_lo"), Name(f"{x}_hi"), Name(f"{x}_done")
    lines: list[Statement] = []

    def down(node: Node) -> Code:
        return in_tiles(over(atom(printer.position(node)), block), block)

    # The span before this one has visited all tiles up to here.
    lo: Code = text("0") if first else done
    if span.lo != Const(0, Type.INT):
        lo = down(span.lo) if first else maximum(down(span.lo), done)
    if not first or span.lo != Const(0, Type.INT):
        lines.append(assign(lo_name.name, lo))
        lo = lo_name
    if span.hi == size:
        hi = Name(inner.length)
    else:
        lines.append(assign(hi.name, printer.position(span.hi)))
    if not last:
        behind: Code = in_tiles(cdiv(hi, block), block)
        if lo == lo_name:
            behind = end_of(lo, hi, behind, text("0") if first else done)
        lines.append(assign(done.name, behind))
    if not span.has_full or not loop.masked:
        return SpanLoops(lines, [Part(lo, hi, loop.masked)])
    full_lo, full_hi = lo, Name(f"{x}_full_hi")
    from_start = span.full_lo == span.lo == Const(0, Type.INT) and first
    if not from_start:
        aligned: Code = in_tiles(cdiv(printer.position(span.full_lo), block), block)
        full_lo = Name(f"{x}_full_lo")
        lines.append(assign(full_lo.name, maximum(aligned, lo) if lo == lo_name else aligned))
    if span.full_hi == span.hi == size and divisible:
        head, rest = Part(lo, minimum(full_lo, hi), True), Part(full_lo, hi, False)
        return SpanLoops(lines, [rest] if from_start else [head, rest])
    lines.append(assign(full_hi.name, down(span.full_hi)))
    full = Part(full_lo, full_hi, False)
    if from_start:
        return SpanLoops(lines, [full, Part(full_hi, hi, True)])
    # One loop visits the boundary tiles of both ends. A third copy of the body makes registers
    # spill: dK/dV tiles of 64 x 64 spilled 224 to 368 bytes with three copies, and 0 to 160 with
    # two.
    gap = Name(f"{x}_gap")
    lines.append(assign(gap.name, maximum(row("sub", full_hi, full_lo), 0)))
    return SpanLoops(lines, [Part(lo, hi, True, gap=(full_lo, gap)), full])


def end_of(lo: Code, hi: Code, end: Code, before: Code) -> Code:
    """Return the first tile that a later span may visit: `end`, or `before` if this span is empty.

    The start of an empty span can be any position, even past the tiles of later spans.
    """
    return row("where", row("lt", lo, hi), end, before)


def in_tiles(number: Code, block: Code) -> Code:
    """Return the position of a tile from its number."""
    return row("mul", number, block)


def listed_loops(block_mask: BlockMask, loop: TileLoop) -> SpanLoops:
    """Return the loops over the listed blocks of a tile: partial blocks with the mask, and full
    blocks without it.
    """
    outer, inner = side_of(loop.outer).name, side_of(loop.inner).name
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
    lines: list[Statement] = [
        assign("row", own),
        Assign(
            ("n_partial", "n_full"),
            tuple(load(row("add", n, "row")) for n in (num_blocks, full_num_blocks)),
        ),
        assign(f"{inner}_blocks", row("add", indices, first)),
    ]
    listed = Name(f"{inner}_blocks")
    with_mask = Part(listed, Name("n_partial"), loop.masked)
    return SpanLoops(
        lines, [with_mask, Part(row("add", listed, "n_partial"), Name("n_full"), False)]
    )
