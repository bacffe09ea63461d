"""Sections on the tiles that a kernel visits: ranges of positions, lists of blocks, and grids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kgen.expr.nodes import FIRST_AT_LEAST, Node, reads, variables
from kgen.expr.spans import Span
from kgen.expr.unparse import show
from kgen.kernels.attention.explaining.drawing import grids
from kgen.kernels.attention.plan.block_mask import BLOCK_SIZE, BlockMask
from kgen.kernels.attention.plan.model import AttentionPlan, TileLoop
from kgen.pages.model import Block, Code, Drawing, Line, Lines, Prose, Words, quoting, words

SIDES = {"q_idx": ("query", "queries"), "kv_idx": ("key", "keys")}


def visits(plan: AttentionPlan) -> Iterator[Block]:
    """Yield the ranges or the lists of each kernel."""
    if plan.block_mask is not None:
        yield from _lists(plan, plan.block_mask)
        return
    if plan.choice.conditions:
        yield _no_lists(plan)
    yield ranges(plan.forward, "forward and dq" if plan.backward else "forward")
    if plan.dkdv is not None:
        yield ranges(plan.dkdv, "dk and dv")
    searched = {
        r for loop in (plan.forward, plan.dkdv) if loop is not None for r in _searched(loop)
    }
    if searched:
        what = ", a binary search, is the first position of x with an element >= v."
        yield Prose(words(Code("first_at_least(x, v)"), what))


def promises(names: Iterable[str]) -> Iterator[Block]:
    """Yield the buffers that kernels would search with `sorted: true`."""
    for name in names:
        order, gain = (Code("sorted: true"), " lets kernels skip tiles.")
        yield Prose(words("If each row of ", Code(name), " ascends, ", order, gain))


def _lists(plan: AttentionPlan, mask: BlockMask) -> Iterator[Block]:
    yield Prose(
        words(
            f"A block has {BLOCK_SIZE} queries and {BLOCK_SIZE} keys. A tile of queries visits its "
            "listed blocks\n"
            "of keys. It evaluates the mask in partial blocks, but not in full blocks."
        )
    )
    if plan.backward:
        yield Prose(words("dk and dv: a tile of keys visits its listed blocks of queries."))
    if plan.choice.conditions:
        lines = tuple(Line(show(condition)) for condition in plan.choice.conditions)
        why = (
            "The block mask is for conditions that no range describes, and that do not repeat "
            "within a block:"
        )
        yield Lines(lines, words(why))
    else:
        why = "Ranges of positions describe the mask too, but the spec sets `block_mask: always`."
        yield Prose(quoting(why))
    own = [
        names
        for names, wanted in (("batches", mask.by_batch), ("heads", mask.by_head))
        if not wanted
    ]
    shared = f", shared by all {' and '.join(own)}" if own else ", for each batch and head"
    made = Code(f"{plan.spec.name}_block_mask")
    yield Prose(
        words(f"A kernel builds the lists{shared}: at every call, or once with ", made, ".")
    )
    sides = [side for side in mask.sides if variables(side) & set(SIDES)]
    how = words("It classifies a block by the least and greatest values of")
    yield Lines(tuple(Line(show(side)) for side in sides), how)
    yield Prose(words("and evaluates every pair of the blocks that these leave undecided."))


def _no_lists(plan: AttentionPlan) -> Prose:
    """Return the reason why conditions without a range get no block mask."""
    if not plan.choice.able:
        why = "packed sequences and decoding do not support one"
    elif plan.spec.block_mask == "never":
        why = "the spec sets `block_mask: never`"
    else:
        why = (
            f"the condition repeats every {plan.choice.period} positions, so every block would "
            "be listed"
        )
    named: list[str | Code] = []
    for condition in plan.choice.conditions:
        if named:
            named.append(" and ")
        named.append(Code(show(condition)))
    return Prose(words("No block mask for ", *named, ": ", *quoting(f"{why}.")))


def drawn(plan: AttentionPlan, drawing: Drawing) -> Iterator[Block]:
    """Yield grids of the tiles of forward, one for all heads with equal tiles."""
    whose, found = grids(plan, drawing)
    yield Prose(quoting(whose))
    yield from found


def ranges(loop: TileLoop, kernels: str) -> Lines:
    """Return the ranges of positions whose tiles a loop visits."""
    one, many = SIDES[loop.inner.index.name]
    outer, outers = SIDES[loop.outer.index.name]
    start, last = loop.outer.start.name, loop.outer.last.name
    lines = [
        Line(
            _interval(span.lo, span.hi),
            "if not visited before" if i else "",
            (_unmasked(span, loop, one, outer),),
        )
        for i, span in enumerate(loop.spans)
    ]
    tile = Code(f"{start} .. {last}")
    heading = words(
        f"{kernels}: a tile of {outers} ", tile, f" visits the tiles of {many} with positions in"
    )
    return Lines(tuple(lines) or (Line(note="none: the mask allows no pair"),), heading)


def _unmasked(span: Span, loop: TileLoop, one: str, outer: str) -> Words:
    if not loop.masked:
        return words("no mask is needed")
    if not span.has_full:
        return words(f"masked throughout: the mask has no closed form in the {one}")
    if (span.full_lo, span.full_hi) == (span.lo, span.hi):
        return words("no mask is needed, except in a tile across an end of the range")
    full = Code(_interval(span.full_lo, span.full_hi))
    return words(
        "no mask is needed within ", full, f", where the mask keeps every {outer} of the tile"
    )


def _interval(low: Node, high: Node) -> str:
    return f"[{show(low)}, {show(high)})"


def _searched(loop: TileLoop) -> list[str]:
    bounds = [b for s in loop.spans for b in (s.lo, s.hi, s.full_lo, s.full_hi)]
    return [r.buffer for b in bounds for r in reads(b) if r.buffer.endswith(FIRST_AT_LEAST)]
