"""What becomes of a spec's expressions, step by step, in words for the person who wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kgen.expr.differentiate import is_one
from kgen.expr.hoist import Binding, Place, Program
from kgen.expr.mask_form import TRUE
from kgen.expr.nodes import Node, Var, reads, substitute, variables
from kgen.expr.show import show
from kgen.expr.softmax_form import QK, SCORE
from kgen.expr.spelling import MUL as TIMES
from kgen.expr.tile_ranges import FIRST_AT_LEAST, Span
from kgen.kernels.attention.plan.block_mask import BLOCK_SIZE, BlockMask
from kgen.kernels.attention.plan.decode import MOST_QUERIES, DecodePlan, decodes, plan_decode
from kgen.kernels.attention.plan.hopper import plan_hopper
from kgen.kernels.attention.plan.hopper_conditions import without_kernels
from kgen.kernels.attention.plan.model import AttentionPlan, ReadGradient, TileLoop
from kgen.kernels.attention.plan.picture import FULL, MASKED, SKIPPED, picture
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.plan.positions import positioned
from kgen.kernels.attention.plan.tile_reads import element_bounds
from kgen.kernels.attention.plan.tuned import Tile
from kgen.spec.load import Loaded

SIDES = {"q_idx": ("query", "queries"), "kv_idx": ("key", "keys")}


def explain(loaded: Loaded, length: int | None = None) -> str:
    """The steps from a spec to its kernels, as plain text; with a picture of the tiles for SQ = SK = `length`."""
    plan = plan_attention(loaded)
    sections = {
        "As read": _as_read(plan, positioned(loaded).trees),
        "Softmax": _softmax(plan),
        "Where it is computed, in the forward kernel": _places(plan.forward),
        "Tiles that are visited": _visits(plan),
        **({"Tiles of queries (down) by keys (across)": _drawn(plan, length)} if length else {}),
        **({"Decoding": _decoding(plan_decode(loaded))} if decodes(loaded) else {}),
        "Gradients": _gradients(plan),
        "Sizes of tiles": _tiles(plan),
    }
    title = f"{plan.spec.name}: {plan.spec.summary.on_terminal()}".rstrip(": ")
    texts = ["\n".join([f"{heading}\n", *lines]) for heading, lines in sections.items()]
    return "\n\n".join([title, *texts]) + "\n"


def _as_read(plan: AttentionPlan, written: Mapping[str, Node]) -> Iterator[str]:
    spec = plan.spec
    score, mask = written.get("score_mod", SCORE), written.get("mask_mod", TRUE)
    yield f"  score_mod = {show(score)}"
    yield f"  mask_mod  = {show(mask)}"
    if plan.score_mod is not None and plan.score_mod != score:
        yield f"  In one form for all its spellings, score_mod = {show(plan.score_mod)}"
    if plan.mask_mod is not None and plan.mask_mod != mask:
        yield f"  In one form for all its spellings, mask_mod = {show(plan.mask_mod)}"
    for name, param in spec.params.items():
        yield (
            f"  {name} = {param.value}, compiled in"
            if not param.runtime
            else f"  {name} is given at every launch"
        )
    for name, buffer in spec.buffers.items():
        promises = [", sorted"] * buffer.sorted + [", with a gradient"] * buffer.grad
        shape = ", ".join(map(str, buffer.shape))
        yield f"  {name} is a tensor [{shape}] of {buffer.dtype}{''.join(promises)}"
    if spec.varlen:
        yield "  Sequences are packed: positions, SQ and SK are those of one sequence, and b is its number"
    if spec.sinks:
        yield "  sinks is a tensor [HQ]: a logit that is in the sum of every row of its head, and has no value"


# --- softmax ------------------------


def _softmax(plan: AttentionPlan) -> Iterator[str]:
    form = plan.form
    yield "  Kernels use 2^x in place of e^x: e^x is 2^(LOG2E * x), with LOG2E = log2(e)."
    yield "  qk is the product of a query and a key, and score = scale * qk."
    yield "  For each (query, key) the loop computes"
    yield ""
    bias = "" if form.bias is None else f" + {show(form.bias)}"
    yield f"      {_product([form.core, form.multiplier])}{bias}"
    yield ""
    if form.core == QK:
        factor = show(form.multiplier)
        names = "scale and LOG2E" if _is_plain(form.multiplier) else "scale, LOG2E and the slope of score_mod"
        yield f"  Folded: score_mod is linear in the score, so {names} are one factor, {factor}."
    else:
        yield "  Not folded: score_mod is not linear in the score, so scale is applied first."
        peeled = sorted(variables(form.multiplier) - {"LOG2E"})
        if peeled:
            yield f"  Peeled: what multiplies the whole ({', '.join(peeled)}) is multiplied with LOG2E, once."
    if form.row_rest is not None:
        rest = show(form.row_rest)
        yield f"  Dropped: {rest}. It is the same for all keys of a query, and softmax does not see"
        yield "  what is added to a whole row. Only the log-sum-exp gets it back, once for each query."
        if form.bias is not None and "q_start" in variables(form.bias):
            yield "  What is added is taken at q_start, the first query of a tile, in place of q_idx."
    if form.max_of_core:
        yield "  The factor is positive: row maxima are taken before it, and it costs no step of its own."
    if not form.finite:
        yield "  Nothing promises that a score is finite: rows are checked for having seen no key at all."


def _is_plain(multiplier: Node) -> bool:
    return variables(multiplier) == {"LOG2E", "scale"}


def _product(factors: Iterable[Node]) -> str:
    """The factors that are not 1, with brackets where a product asks for them."""
    kept = [f for f in factors if not is_one(f)]
    multiplied = TIMES if len(kept) > 1 else 0
    return " * ".join(show(f, multiplied + (i > 0 and multiplied > 0)) for i, f in enumerate(kept)) or "1"


# --- places ------------------------


def _places(loop: TileLoop) -> Iterator[str]:
    program = loop.program
    yield "  Names are those of the emitted file."
    groups: dict[str, list[str]] = {heading: [] for heading in _HEADINGS}
    for binding in program.bindings:
        group = groups[_heading(binding.place, binding.node, program)]
        group.append(f"{binding.name} = {show(binding.node)}")
        for low, high in element_bounds(binding, loop).values():
            group.append(
                "    read once for all pairs of a tile where the least and greatest index are equal,"
            )
            group.append(f"    {show(low)} and")
            group.append(f"    {show(high)}")
    results = program.results
    axis = {"outer_live": loop.outer, "inner_live": loop.inner}
    for name, side in axis.items():
        if results[name] != TRUE:
            live = Var(f"{side.index.name.removesuffix('_idx')}_live", results[name].type)
            groups[_heading(program.place(live), live, program)].append(
                f"{live.name} = {show(results[name])}"
            )
    if "row_rest" in results:
        groups[_QUERY].append(f"lse = lse of the loop + {show(results['row_rest'])}")
    if loop.masked:
        groups[_PAIR].append(f"mask = {show(results['mask'])}")
    bias = f" + {show(results['bias'])}" if "bias" in results else ""
    groups[_PAIR].append(f"s = {_product([results['core'], results['qk_scale']])}{bias}")
    for heading, lines in groups.items():
        if lines:
            yield f"  {heading}"
            yield from (f"      {line}" for line in lines)


_KERNEL, _HEAD, _QUERIES = "the same everywhere", "once for each (b, h)", "once for each tile of queries"
_QUERY, _KEYS, _KEY, _PAIR = (
    "for each query, before the loop",
    "for each tile of keys",
    "for each key of a tile",
    "for each (query, key)",
)
_HEADINGS = (_KERNEL, _HEAD, _QUERIES, _QUERY, _KEYS, _KEY, _PAIR)


def _heading(place: Place, node: Node, program: Program) -> str:
    if len(place.axes) == 2:
        return _PAIR
    if place.axes:
        return _QUERY if place.axes == ("q",) else _KEY
    if place.in_loop:
        return _KEYS
    names = variables(_in_full(node, program.bindings))
    if names & {"q_start", "q_last"}:
        return _QUERIES
    return _HEAD if names & {"b", "h"} else _KERNEL


def _in_full(node: Node, bindings: Iterable[Binding]) -> Node:
    """With names of bindings replaced by what they are bound to."""
    full: dict[Node, Node] = {}
    for binding in bindings:
        full[Var(binding.name, binding.node.type)] = substitute(binding.node, full)
    return substitute(node, full)


# --- tiles ------------------------


def _visits(plan: AttentionPlan) -> Iterator[str]:
    if plan.block_mask is not None:
        yield from _lists(plan, plan.block_mask)
        return
    if plan.choice.conditions:
        yield from _no_lists(plan)
    yield from _ranges(plan.forward, "forward and dq" if plan.backward else "forward")
    if plan.dkdv is not None:
        yield from _ranges(plan.dkdv, "dk and dv")
    searched = {r for loop in (plan.forward, plan.dkdv) if loop is not None for r in _searched(loop)}
    if searched:
        yield "  first_at_least(x, v), a binary search, is the first position of x with an element >= v."


def _lists(plan: AttentionPlan, mask: BlockMask) -> Iterator[str]:
    yield f"  Blocks are of {BLOCK_SIZE} queries by {BLOCK_SIZE} keys. A tile of queries visits the blocks of keys"
    yield "  listed for it: those that the mask leaves in part with the mask, those that it leaves whole without."
    if plan.backward:
        yield "  dk and dv: a tile of keys visits the blocks of queries of lists the other way round."
    if plan.choice.conditions:
        yield "  No range of positions says where these hold, and they do not repeat within a block:"
        yield from (f"      {show(condition)}" for condition in plan.choice.conditions)
    else:
        yield "  Ranges of positions would say as much: `block_mask: always` asks for lists all the same."
    own = [names for names, wanted in (("batches", mask.by_batch), ("heads", mask.by_head)) if not wanted]
    shared = f", shared by all {' and '.join(own)}" if own else ", for each batch and head"
    yield f"  A kernel makes the lists{shared}: at every call, or once with {plan.spec.name}_block_mask."
    yield "  It decides on a block by the least and greatest values of"
    sides = [side for side in mask.sides if variables(side) & set(SIDES)]
    yield from (f"      {show(side)}" for side in sides)
    yield "  and where these do not tell, it looks at every pair of the block."


def _no_lists(plan: AttentionPlan) -> Iterator[str]:
    """Why conditions without a range get no block mask."""
    conditions = [show(condition) for condition in plan.choice.conditions]
    if not plan.choice.able:
        why = "packed sequences and decoding do not support one yet"
    elif plan.spec.block_mask == "never":
        why = "the spec says `block_mask: never`"
    else:
        why = f"that repeats every {plan.choice.period} positions, so every block would be listed"
    yield f"  No block mask for {' and '.join(conditions)}: {why}."


def _drawn(plan: AttentionPlan, length: int) -> Iterator[str]:
    drawn = picture(plan, length)
    queries, keys = drawn.tile
    assumed = "".join(f", {text}" for text in drawn.assumed)
    yield f"  SQ = SK = {length}{assumed}; one character is {queries} queries by {keys} keys"
    yield f"  {SKIPPED} never visited   {MASKED} with the mask   {FULL} without it"
    yield ""
    yield from (f"      {row}" for row in drawn.rows)
    tiles = "".join(drawn.rows)
    parts = (f"{tiles.count(kind) / len(tiles):.0%} {what}" for kind, what in _KINDS)
    yield ""
    yield f"  {', '.join(parts)}"


_KINDS = ((SKIPPED, "skipped"), (MASKED, "masked"), (FULL, "unmasked"))


def _decoding(plan: DecodePlan) -> Iterator[str]:
    """How few queries read many keys."""
    whose = "Any number of queries comes" if plan.alone else f"Up to {MOST_QUERIES} queries come"
    yield f"  {whose} here; a row of a tile is a query of one head, and the heads that share K and V share a tile."
    yield from _ranges(plan.attention.forward, "each tile of rows")
    if plan.balanced:
        yield "  These tiles are split over programs: a sequence gets as many of them as its share of all tiles."
    else:
        yield "  These tiles are split over programs, evenly, in as many parts for each sequence."
    if plan.page_size is not None:
        yield f"  Keys lie in pages of {plan.page_size}, {'one' if plan.page_per_tile else 'several'} to a tile."
    for chip in sorted(plan.tiles, reverse=True):
        tile = plan.tiles[chip]
        yield (
            f"  {_chip(chip):<16} at most {tile.BLOCK_M} rows x {tile.BLOCK_N} keys, {tile.num_warps} warps, "
            f"{tile.num_stages} stages, {tile.per_sm} programs for each multiprocessor"
        )


def _ranges(loop: TileLoop, kernels: str) -> Iterator[str]:
    one, many = SIDES[loop.inner.index.name]
    outer, outers = SIDES[loop.outer.index.name]
    start, last = loop.outer.start.name, loop.outer.last.name
    yield f"  {kernels}: a tile of {outers} {start} .. {last} visits the tiles of {many} with positions in"
    for i, span in enumerate(loop.spans):
        yield f"      {_interval(span.lo, span.hi)}" + (", where they were not visited yet" if i else "")
        yield f"          {_unmasked(span, loop, one, outer)}"
    if not loop.spans:
        yield "      nothing: the mask allows no pair"


def _unmasked(span: Span, loop: TileLoop, one: str, outer: str) -> str:
    if not loop.masked:
        return "no mask is needed"
    if not span.has_full:
        return f"masked throughout: the mask has no closed form in the {one}"
    if (span.full_lo, span.full_hi) == (span.lo, span.hi):
        return "no mask is needed, except in a tile that reaches past an end of it"
    full = _interval(span.full_lo, span.full_hi)
    return f"no mask is needed within {full}, which every {outer} of the tile allows"


def _interval(low: Node, high: Node) -> str:
    return f"[{show(low)}, {show(high)})"


def _searched(loop: TileLoop) -> list[str]:
    bounds = [b for s in loop.spans for b in (s.lo, s.hi, s.full_lo, s.full_hi)]
    return [r.buffer for b in bounds for r in reads(b) if r.buffer.endswith(FIRST_AT_LEAST)]


# --- gradients ------------------------


def _gradients(plan: AttentionPlan) -> Iterator[str]:
    if plan.dq is None or plan.dkdv is None:
        yield "  None: `passes` does not ask for backward."
        return
    yield "  ds is the gradient of the loss in score_mod, for each (query, key): p * (dp - delta)."
    yield f"  d score_mod / d score = {_product([plan.dq.dscore_factor, plan.dq.dscore])}"
    for name, loop in (("dq", plan.dq), ("dk", plan.dkdv)):
        inside = "ds" if is_one(loop.dscore) else "ds * (d score_mod / d score)"
        if not (is_one(loop.dscore) or is_one(loop.dscore_factor)):
            inside = f"ds * {show(loop.dscore, TIMES)}"
        after = _product([Var("scale", QK.type), loop.dscore_factor])
        side = "keys" if name == "dq" else "queries"
        yield f"  {name} adds up {inside} times {side}, and is multiplied by {after} after the loop"
    for gradient in plan.gradients:
        yield ""
        yield f"  d score_mod / d {_read(gradient)} = {_product([gradient.factor, gradient.derivative])}"
        yield from (f"      {line}" for line in _reduction(gradient, plan))
    wanted = [name for name, buffer in plan.spec.buffers.items() if buffer.grad]
    if not wanted and plan.spec.buffers:
        yield "  No buffer has `grad: true`."


def _read(gradient: ReadGradient) -> str:
    return f"{gradient.buffer}[{', '.join(show(i) for i in gradient.indices)}]"


def _reduction(gradient: ReadGradient, plan: AttentionPlan) -> Iterator[str]:
    if gradient.along == "pair":
        if gradient.summed is None:
            yield "The dq kernel adds it to its element for each (query, key), with an atomic addition:"
            yield "the order of the sum, and so its last bits, may differ from run to run."
            return
        absent = [name for name in ("b", "h") if name not in gradient.summed]
        over = (
            f", which loops over {' and '.join({'b': 'batches', 'h': 'heads'}[n] for n in absent)}"
            if absent
            else ""
        )
        yield f"A kernel of its own writes each tile of it once{over}: no atomics, the same bits every time."
        return
    if gradient.along == "distance":
        yield "A kernel of its own adds up the tiles on each diagonal of each (b, h), then the diagonals of their sum;"
        yield "the launcher adds the number of each distance = q_idx - kv_idx to the element that it belongs to"
        yield "(index_put with accumulation): no atomics for pairs, the same bits every time."
        return
    one, kernel = ("query", "dq") if gradient.along == "q" else ("key", "dk and dv")
    yield f"The {kernel} kernel keeps one number for each {one} of each (b, h) and writes it once;"
    if gradient.summed is not None:
        kept = ", ".join(gradient.summed) or "nothing"
        yield f"the launcher sums over all but {kept}: no atomics, the same bits every time."
    else:
        yield "the launcher adds each number to the element that it belongs to (index_put with accumulation)."


# --- tile tables ------------------------


def _tiles(plan: AttentionPlan) -> Iterator[str]:
    tables = {"forward": plan.tiles.forward}
    if plan.backward:
        tables |= {"dq": plan.tiles.dq, "dk and dv": plan.tiles.dkdv}
    tables |= {"pairs": plan.tiles.pair} if plan.pairs else {}
    tables |= {"diagonals": plan.tiles.diagonal} if plan.diagonals else {}
    yield "  queries x keys, warps, pipeline stages; TMA where the strides of the tensors allow it"
    for kernel, table in tables.items():
        for chip in sorted(table, reverse=True):
            for tile in table[chip]:
                yield f"  {kernel:<10} {_chip(chip):<16} {_tile(tile)}"
    yield from _on_hopper(plan)


def _on_hopper(plan: AttentionPlan) -> Iterator[str]:
    hopper, missing = plan_hopper(plan), without_kernels(plan)
    if missing and len(set(missing.values())) == 1 and hopper is None:
        yield f"  No kernels for Hopper: {next(iter(missing.values()))}."
    else:
        yield from (f"  No kernels for Hopper, {name}: {why}." for name, why in missing.items())
    if hopper is None:
        return
    compute = "two" if hopper.forward is None or hopper.forward.chained else "three or two"
    yield f"  Where TMA can load the tensors, sm_90 has kernels of its own: one warpgroup loads, {compute} compute."
    order = "from a counter" if hopper.dynamic else "in turn"
    kernels = {
        "forward": hopper.forward,
        "dq, dk, dv": hopper.fused,
        "dq": hopper.dq,
        "dk and dv": hopper.dkdv,
    }
    for kernel, tile in kernels.items():
        if tile is not None:
            sizes = f"{tile.BLOCK_M} x {tile.BLOCK_N}"
            least = f", of {hopper.least_keys} keys or more" if tile is hopper.fused else ""
            yield f"  {kernel:<10} {'sm_90, Gluon':<16} {sizes}, each program takes tiles {order}{least}"
    if any(found.bias for found in hopper.idioms.values()):
        yield "  The bias grows by the same from key to key: it is where their products of queries and keys begin."
    if any(found.documents for found in hopper.idioms.values()):
        yield "  Documents are sorted: their tiles of keys begin with the document of the first query."


def _chip(chip: int) -> str:
    return f"sm_{chip}" if chip else "any other chip"


def _tile(tile: Tile) -> str:
    loads = ", TMA" if tile.TMA else ""
    return f"{tile.BLOCK_M} x {tile.BLOCK_N}, {tile.num_warps} warps, {tile.num_stages} stages{loads}"
