"""Which tiles a kernel visits: in ranges of positions, by lists of blocks, and drawn."""

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
    """Of each kernel."""
    if plan.block_mask is not None:
        yield from _lists(plan, plan.block_mask)
        return
    if plan.choice.conditions:
        yield _no_lists(plan)
    yield ranges(plan.forward, "forward and dq" if plan.backward else "forward")
    if plan.dkdv is not None:
        yield ranges(plan.dkdv, "dk and dv")
    searched = {r for loop in (plan.forward, plan.dkdv) if loop is not None for r in _searched(loop)}
    if searched:
        what = ", a binary search, is the first position of x with an element >= v."
        yield Prose(words(Code("first_at_least(x, v)"), what))


def promises(names: Iterable[str]) -> Iterator[Block]:
    """Buffers that kernels would search if the spec promised their order."""
    for name in names:
        order, gain = (Code("sorted: true"), " lets kernels skip tiles.")
        yield Prose(words("If each row of ", Code(name), " ascends, ", order, gain))


def _lists(plan: AttentionPlan, mask: BlockMask) -> Iterator[Block]:
    yield Prose(
        words(
            f"Blocks are of {BLOCK_SIZE} queries by {BLOCK_SIZE} keys. A tile of queries visits the blocks of keys\n"
            "listed for it: those that the mask leaves in part with the mask, those that it leaves whole without."
        )
    )
    if plan.backward:
        yield Prose(
            words("dk and dv: a tile of keys visits the blocks of queries of lists the other way round.")
        )
    if plan.choice.conditions:
        lines = tuple(Line(show(condition)) for condition in plan.choice.conditions)
        why = "No range of positions says where these hold, and they do not repeat within a block:"
        yield Lines(lines, words(why))
    else:
        why = "Ranges of positions would say as much: `block_mask: always` asks for lists all the same."
        yield Prose(quoting(why))
    own = [names for names, wanted in (("batches", mask.by_batch), ("heads", mask.by_head)) if not wanted]
    shared = f", shared by all {' and '.join(own)}" if own else ", for each batch and head"
    made = Code(f"{plan.spec.name}_block_mask")
    yield Prose(words(f"A kernel makes the lists{shared}: at every call, or once with ", made, "."))
    sides = [side for side in mask.sides if variables(side) & set(SIDES)]
    how = words("It decides on a block by the least and greatest values of")
    yield Lines(tuple(Line(show(side)) for side in sides), how)
    yield Prose(words("and where these do not tell, it looks at every pair of the block."))


def _no_lists(plan: AttentionPlan) -> Prose:
    """Why conditions without a range get no block mask."""
    if not plan.choice.able:
        why = "packed sequences and decoding do not support one yet"
    elif plan.spec.block_mask == "never":
        why = "the spec says `block_mask: never`"
    else:
        why = f"that repeats every {plan.choice.period} positions, so every block would be listed"
    named: list[str | Code] = []
    for condition in plan.choice.conditions:
        named += [" and "] * bool(named) + [Code(show(condition))]
    return Prose(words("No block mask for ", *named, ": ", *quoting(f"{why}.")))


def drawn(plan: AttentionPlan, drawing: Drawing) -> Iterator[Block]:
    """Grids of the tiles of forward: of one head where all are the same, or of each."""
    whose, found = grids(plan, drawing)
    yield Prose(quoting(whose))
    yield from found


def ranges(loop: TileLoop, kernels: str) -> Lines:
    """The ranges of positions whose tiles a loop visits."""
    one, many = SIDES[loop.inner.index.name]
    outer, outers = SIDES[loop.outer.index.name]
    start, last = loop.outer.start.name, loop.outer.last.name
    lines = [
        Line(
            _interval(span.lo, span.hi),
            "where they were not visited yet" if i else "",
            (_unmasked(span, loop, one, outer),),
        )
        for i, span in enumerate(loop.spans)
    ]
    tile = Code(f"{start} .. {last}")
    heading = words(f"{kernels}: a tile of {outers} ", tile, f" visits the tiles of {many} with positions in")
    return Lines(tuple(lines) or (Line(note="nothing: the mask allows no pair"),), heading)


def _unmasked(span: Span, loop: TileLoop, one: str, outer: str) -> Words:
    if not loop.masked:
        return words("no mask is needed")
    if not span.has_full:
        return words(f"masked throughout: the mask has no closed form in the {one}")
    if (span.full_lo, span.full_hi) == (span.lo, span.hi):
        return words("no mask is needed, except in a tile that reaches past an end of it")
    full = Code(_interval(span.full_lo, span.full_hi))
    return words("no mask is needed within ", full, f", which every {outer} of the tile allows")


def _interval(low: Node, high: Node) -> str:
    return f"[{show(low)}, {show(high)})"


def _searched(loop: TileLoop) -> list[str]:
    bounds = [b for s in loop.spans for b in (s.lo, s.hi, s.full_lo, s.full_hi)]
    return [r.buffer for b in bounds for r in reads(b) if r.buffer.endswith(FIRST_AT_LEAST)]
