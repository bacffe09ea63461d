"""The Hopper kernels whose programs own tiles of queries: forward and dq."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.lowered.model import LoopKernel
from kgen.kernels.attention.plan.ends import Ends, ends_of
from kgen.kernels.attention.plan.idioms import Idioms, LinearBias
from kgen.kernels.attention.plan.model import TileLoop
from kgen.kernels.attention.plan.tile_reads import mask_reads
from kgen.kernels.attention.schedules.hopper.loops import (
    ZERO,
    ConsumedTile,
    DocumentEnds,
    DocumentMask,
    MaskLoad,
    Own,
    TileRange,
    begin_of_range,
    from_zero,
    head_of,
    names_of_tile,
    of_half,
    offsets,
    own_range,
    passed_names,
    tile_range,
)
from kgen.kernels.attention.schedules.hopper.plan import HopperTile
from kgen.kernels.attention.schedules.hopper.reads import from_first_key, mask_of_documents
from kgen.kernels.attention.schedules.hopper.records import Record, reached, record
from kgen.targets.code import (
    Assign,
    Code,
    Name,
    Statement,
    assign,
    cdiv,
    maximum,
    minimum,
    needed,
    op,
    over,
    renamed,
    row,
    text,
    times,
    uses_of,
)

MASKED_TILES = ("n_first_masked", "n_last_masked")
"""The numbers of masked tiles at the start and at the end of a range."""
OUTSIDE = ("b", "h", "q_idx", "q_start", "item")
"""The names that a consumer of queries defines for its tile."""


@dataclass(frozen=True)
class QuerySteps:
    """The loop over tiles of keys of a kernel that owns tiles of queries."""

    tile: HopperTile
    idioms: Idioms
    roped: bool
    """True if keys have tiles of rope columns."""
    begun: bool
    """True if the first tile is processed before the loops."""
    forward: bool = False
    """True in forward: masked tiles have a separate loop, if they are only at one end."""


@dataclass(frozen=True)
class ProductBias:
    """A bias that is linear in the key, with which the product of the scores begins."""

    start: Code
    slope: Code
    scale: Code


@dataclass(frozen=True)
class QueryPart:
    """A loop over the tiles of keys `[lo, hi)`."""

    lo: Code
    hi: Code
    masked: list[str]
    """The compile-time parameter for tiles with the mask; empty if this is known only at run
    time.
    """


@dataclass(frozen=True)
class MaskedTiles:
    """The tiles of keys that need the mask, and the loops over all tiles, or over all except the
    first.
    """

    tile: Code
    """The condition that the current tile has the mask."""
    param: list[str]
    loops: list[QueryPart]


@dataclass(frozen=True)
class QueriesLoop:
    """A kernel that owns tiles of queries: its range of keys, and the statements for one tile of
    keys.
    """

    kernel: str
    """The name of the kernel in the names of its records."""
    range: TileRange
    body: ConsumedTile
    begin: list[Statement]
    """The values that a consumer computes for a published tile of queries."""
    prologue: list[Statement]
    """The statements of `begin` that come from the plan."""
    offs_n: list[Statement]
    passed: list[str]
    """The values that the functions of a tile read and do not change."""
    product: Code
    """The asynchronous product that computes the scores of a tile."""
    bias: ProductBias | None
    own_bounds: list[Statement]
    """The statements that find the tiles of this half."""
    past: bool
    """True if only the other half may need some tiles at the end of the range."""
    ahead: bool
    """True if only the other half may need some tiles at the start of the range."""
    fewer_first: bool
    """True if a half may have fewer masked tiles at the start."""
    kv_start: Code
    """The start of the j-th tile of keys."""
    v_start: Code
    first_start: Code
    of_tiles: list[str]
    """The arguments of the loop's function that describe the range."""
    asks: frozenset[str]
    """The fields of a published tile that the consumers need."""
    needs_mask: Code
    """The condition that the current tile has the mask."""
    mask_param: list[str]
    """The parameter with this condition, if it is a compile-time constant."""
    loops: list[QueryPart]
    """The loops over all tiles, or over all except the first."""
    row_rest: Code | None
    sink: Code
    store_guard: Code | None
    vector_guard: Code | None
    reach: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    """Expressions for the values of a call inside the functions of the loop, by name."""

    @property
    def scores(self) -> Statement:
        """The statement that begins the scores of a tile."""
        return assign("qk_async", self.product)

    @property
    def fixed(self) -> Record:
        """The record of values that the functions of a tile use."""
        return record(f"{self.kernel}Fixed", "fixed", self.passed, self.reach)

    def reached(self, reach: Mapping[str, str]) -> QueriesLoop:
        """Return the loop with names as fields of the records of its functions."""
        inner = replace(self, reach=reach).fixed.reach
        assert not inner.keys() & self.body.defines
        body = replace(reached(self.body, inner), lse_lines=reached(self.body.lse_lines, reach))
        product, bias = reached(self.product, inner), reached(self.bias, inner)
        return replace(reached(self, reach), body=body, product=product, bias=bias, reach=reach)


@dataclass(frozen=True)
class HiddenKeys:
    """The test in forward for keys past the end, in the first tile that it processes."""

    live: Statement
    needed: list[Statement]
    """The statements that the bounds of the range do not already contain."""
    last_live: Statement
    names: list[str]
    """The parameters of functions that test for hidden keys."""
    given: list[str]
    """The arguments for these parameters."""
    of_scores: bool
    """True if hidden scores must be numbers."""

    def cleared(self, tile: str, start: str, rows: str = "BLOCK_N") -> str:
        """Return the call that clears a tile of `rows` keys."""
        return f"_clear_hidden({', '.join([tile, start, *self.given])}, BLOCK_N={rows})"


def hidden_keys(
    kernel: LoopKernel, loop: QueriesLoop, problem: list[str], of_scores: bool
) -> HiddenKeys:
    """Return the test for keys of forward that only its mask hides."""
    (live,) = (line for line in kernel.body.mask_lines if line.defines == {"kv_live"})
    assert isinstance(live, Assign)
    names = passed_names(uses_of([live]), ["b", "h", *kernel.prologue], problem)
    return HiddenKeys(
        live=live,
        needed=[
            line for line in needed(kernel.prologue, live.uses) if line not in loop.range.bounds
        ],
        last_live=assign("last_live", renamed(live.value, {"kv_idx": Name("kv_last")})),
        names=names,
        given=names,
        of_scores=of_scores,
    )


@dataclass(frozen=True)
class _Made:
    """A portable kernel with its changes for Hopper."""

    kernel: LoopKernel
    ends: Ends
    bias: ProductBias | None
    of_documents: DocumentEnds | None
    documents: DocumentMask | None
    mask_loads: list[MaskLoad]


def queries_loop(
    kernel: LoopKernel, steps: QuerySteps, of: TileLoop, kernels: Lowering, problem: list[str]
) -> QueriesLoop:
    """Return a kernel that owns tiles of queries: forward or dq."""
    of_documents, documents = None, None
    if (found := steps.idioms.documents) is not None:
        kernel, of_documents = from_first_key(kernel, found, of, kernels)
        if steps.forward:
            kernel, documents = mask_of_documents(kernel, found, of, kernels)
    kernel, bias = _with_bias(kernel, steps.idioms.bias, of, kernels)
    ends = ends_of(of)
    if of_documents is not None:
        ends = ends.from_first_key()
    made = _Made(kernel, ends, bias, of_documents, documents, _mask_loads(kernel, of, kernels))
    return _loop(made, steps, kernels.packed, problem)


def _with_bias(
    kernel: LoopKernel, found: LinearBias | None, of: TileLoop, kernels: Lowering
) -> tuple[LoopKernel, ProductBias | None]:
    """Return a kernel, and the bias with which its product begins, if there is one.

    Scores are q @ k^T times a positive number. A bias that is linear in the key is divided by that
    number.
    """
    if found is None:
        return kernel, None
    printer = kernels.printer(of)
    distance, slope, scale = (
        printer.own(node) for node in (found.distance, found.slope, found.scale)
    )
    body = replace(kernel.body, score_lines=[], logits="qk", scaled=scale)
    prologue = [*kernel.prologue, assign("slope", row("div", slope, scale))]
    return replace(kernel, prologue=prologue, body=body), ProductBias(
        times("slope", distance), Name("slope"), scale
    )


def _product(steps: QuerySteps, bias: ProductBias | None) -> Code:
    """Return the asynchronous product that computes the scores of a tile."""
    # If dq has separate rings for K and V, it processes no tile before its loop.
    keys = "_keys(kv_ring, n_used)" if steps.forward or steps.begun else "k"
    product = op("_async_dot_nt(q, {0}, SCORES)", keys)
    if bias is not None:
        product = op("_async_dot_biased(q, {0}, {1}, {2}, SCORES)", keys, bias.start, bias.slope)
    return (
        op("_async_dot_nt_plus({0}, q_rope, _rope_keys(kv_ring, n_used))", product)
        if steps.roped
        else product
    )


def _loop(made: _Made, steps: QuerySteps, packed: bool, problem: list[str]) -> QueriesLoop:
    kernel, bias, documents = made.kernel, made.bias, made.documents
    product, listed, searches = _product(steps, bias), kernel.ranges.listed, kernel.ranges.searches
    before = [of_half(line, "q") for line in kernel.prologue if "offs_n" not in line.defines]
    found = tile_range(kernel, made.ends.searches, [*before, *searches], made.of_documents)
    used_by_tiles = names_of_tile(kernel, documents)
    after = _used_after(kernel) | product.names
    prologue = needed(before, used_by_tiles | after)
    own = own_range(kernel, made.ends, [*before, *searches], prologue, True, steps.tile.BLOCK_N)
    lines = _own_bounds(found, own)
    first: Code = Name("n_past") if own.past else ZERO
    end: Code = row("sub", "n_tiles", "n_ahead") if own.ahead else Name("n_tiles")
    passed = passed_names(
        used_by_tiles | product.names, [*OUTSIDE, "n_first_masked", *before], problem
    )
    masked = _masked_tiles(kernel.body.masked, found, first, end, steps)
    lo = begin_of_range(found, "kv_lo")
    kv_start = start_of_keys(Name("j"), lo, listed)
    of_tiles = uses_of([kv_start, masked.tile])
    asks = uses_of([*lines, kv_start, *(e for part in masked.loops for e in (part.lo, part.hi))])
    used = uses_of([*prologue, *own.lines]) | after | {*passed}
    row_ends = [assign("q_end", row("add", "q_begin", "SQ"))] if packed else []
    q_idx = assign("q_idx", row("add", "q_start", "offs_m"))
    return QueriesLoop(
        kernel="Forward" if steps.forward else "Dq",
        range=found,
        body=_body(kernel, made.mask_loads, documents),
        begin=[head_of(used, packed), *found.blocks, *row_ends, q_idx, *prologue],
        prologue=prologue,
        offs_n=offsets("BLOCK_N", 0) if "offs_n" in uses_of(prologue) else [],
        passed=passed,
        product=product,
        bias=bias,
        own_bounds=lines,
        past=own.past,
        ahead=own.ahead,
        fewer_first=own.full_ahead and not own.full_past,
        kv_start=kv_start,
        v_start=start_of_keys(row("sub", "j", "LAG"), lo, listed)
        if listed
        else row("add", "kv_start", row("mul", "LAG", "BLOCK_N")),
        first_start=start_of_keys(first, lo, listed),
        of_tiles=[n for n in ("kv_blocks", "kv_lo", *MASKED_TILES, "n_tiles") if n in of_tiles],
        asks=asks | of_tiles | {*passed},
        needs_mask=masked.tile,
        mask_param=masked.param,
        loops=masked.loops,
        row_rest=kernel.row_rest,
        sink=kernel.sink,
        store_guard=kernel.store_guard,
        vector_guard=kernel.vector_guard,
    )


def _used_after(kernel: LoopKernel) -> frozenset[str]:
    """Return the names that a consumer of queries uses outside the loop."""
    found = uses_of([kernel.row_rest, kernel.sink, *kernel.body.lse_lines, kernel.vector_guard])
    gradients = kernel.gradients
    return (
        found
        if gradients is None
        else found | uses_of([gradients.factor, *(g.value for g in gradients.row_gradients)])
    )


def _own_bounds(found: TileRange, own: Own) -> list[Statement]:
    """Return the statements that count the tiles that a half skips, and its masked tiles."""
    lines = [*own.lines]
    last: Code = row("sub", "n_tiles", 1)
    if own.past:
        left_out = row("sub", "n_tiles", cdiv(row("sub", "own_hi", "kv_lo"), "BLOCK_N"))
        lines.append(assign("n_past", minimum(left_out, last)))
    if own.ahead:
        left = row("sub", last, "n_past") if own.past else last
        fewer: Code = minimum(over(row("sub", "own_lo", "kv_lo"), "BLOCK_N"), left)
        lines.append(assign("n_ahead", maximum(fewer, 0) if own.before else fewer))
    if own.full_past:
        rest: Code = row("sub", "n_tiles", over(row("sub", "own_full_hi", "kv_lo"), "BLOCK_N"))
        if found.from_first_key is not None:
            rest = op("{tl}.where({0}, {1}, {2})", row("gt", "n_first_masked", 0), "n_tiles", rest)
        lines.append(assign("n_last_masked", rest))
    if own.full_ahead:
        lines.append(assign("n_first_masked", over(row("sub", "own_full_lo", "kv_lo"), "BLOCK_N")))
    return [line.map(from_zero) for line in lines] if found.from_start else lines


def last_masked(forward: QueriesLoop, dq: QueriesLoop | None) -> Code:
    """Return the number of masked tiles at the end of a tile's range, in the producer.

    If all tiles need the mask, they count as tiles at the start. The exception is a consumer that
    may have fewer tiles at the start.
    """
    found, left = forward.range, Name("n_tiles")
    if not found.has_full:
        return left
    fewer_first = forward.fewer_first or (dq is not None and dq.fewer_first)
    if not fewer_first and found.head is not None:
        rest: Code = row("sub", left, "n_first_masked")
        return row("sub", rest, maximum(cdiv(found.full_length, "BLOCK_N"), 0))
    full = found.full_end if fewer_first else found.full_length
    return row("sub", left, maximum(cdiv(full, "BLOCK_N"), 0))


def _masked_tiles(
    masked: bool, found: TileRange, first: Code, end: Code, steps: QuerySteps
) -> MaskedTiles:
    """Return the loops over tiles, and the condition that a tile needs the mask.

    If the first tile is processed before, the loops skip it.
    """
    second = text("1") if first == ZERO else row("add", first, 1)
    after = second if steps.begun else first
    whole = [QueryPart(after, end, [])]
    if not (masked and found.has_full):
        return MaskedTiles(text(str(masked)), [], whole)
    if steps.forward and found.head is None:
        # At least one tile counts as masked, because ptxas 12.8 reads values of the first loop in
        # the second.
        from_here = maximum("n_last_masked", second)
        ends = Name("n_last_masked") if steps.begun else from_here
        loops = [
            QueryPart(after, ends, ["MASKED=True"]),
            QueryPart(from_here, end, ["MASKED=False"]),
        ]
        return MaskedTiles(text("MASKED"), ["MASKED: tl.constexpr"], loops)
    own = row("lt", "j", "n_last_masked")
    if found.head is not None:
        own = row("or", own, row("ge", "j", row("sub", "n_tiles", "n_first_masked")))
    return MaskedTiles(own, [], whole)


def _mask_loads(kernel: LoopKernel, of: TileLoop, kernels: Lowering) -> list[MaskLoad]:
    """Return the reads of a mask for each key, except single bytes."""
    found = {
        n: b for n, b in mask_reads(of).items() if kernels.layouts[b].dtype not in ("bool", "uint8")
    }
    lines = {line.name: line for line in kernel.body.mask_lines if isinstance(line, Assign)}

    def dtype(buffer: str) -> Code:
        as_floats = kernels.layouts[buffer].dtype in ("bf16", "fp16", "any")
        return text("gl.float32") if as_floats else op("{0}.dtype.element_ty", f"{buffer}_ptr")

    return [
        MaskLoad(name, dtype(found[name]), line) for name, line in lines.items() if name in found
    ]


def _body(
    kernel: LoopKernel, loads: list[MaskLoad], documents: DocumentMask | None
) -> ConsumedTile:
    """Return the values of a tile.

    The `loads` of its mask are issued before the wait for the product.
    """
    body, asked = kernel.body, [load.line for load in loads]
    return ConsumedTile(
        masked=body.masked,
        mask_loads=loads,
        mask_lines=[line for line in body.mask_lines if line not in asked],
        mask=None,
        documents=documents,
        score_lines=body.score_lines,
        logits=body.logits,
        scaled=body.scaled,
        dead_rows=body.dead_rows,
        lse_lines=body.lse_lines,
    )


def start_of_keys(j: Code, lo: Code, listed: bool) -> Code:
    """Return the start of the j-th tile of keys of a tile of queries."""
    if listed:
        return op("_listed({0}, {1}, BLOCK_N)", j, "kv_blocks")
    return op("_last_first({0}, {1}, {2}, BLOCK_N)", j, lo, "n_tiles")
