"""The Hopper kernels whose programs own tiles of keys: dk and dv, with or without dq."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.lowered.model import Gradients, LoopKernel
from kgen.kernels.attention.plan.ends import ends_of
from kgen.kernels.attention.plan.model import TileLoop
from kgen.kernels.attention.schedules.hopper.loops import (
    NO_OWN,
    ZERO,
    ConsumedTile,
    GradientOfScores,
    Own,
    TileRange,
    begin_of_range,
    from_zero,
    gradient_of_scores,
    head_of,
    names_of_tile,
    of_half,
    offsets,
    own_range,
    passed_names,
    tile_range,
)
from kgen.kernels.attention.schedules.hopper.plan import HopperPlan, HopperTile
from kgen.kernels.attention.schedules.hopper.queries import MASKED_TILES
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
    row,
    uses_of,
)


@dataclass(frozen=True)
class KeyPart:
    """A loop over the tiles of queries `[lo, hi)`, and the tiles around it that only the other half
    needs.
    """

    masked: bool
    lo: str
    hi: str
    ahead: list[str] = field(default_factory=list)
    """The number of tiles that the loop skips before its start, in a list of zero or one name."""
    past: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class KeyConsumer:
    """The values that one consumer computes for a published tile of keys."""

    offs_n: list[Statement]
    begin: list[Statement]


@dataclass(frozen=True)
class KeyProducts:
    """The products of a tile: a consumer processes its queries at once, or in two halves."""

    lse_rows: str
    delta_rows: str
    younger: int
    """Number of products that start after the product of the scores."""
    columns: str
    held: str
    """The operands that contain K and V, as parameters of the loop's function."""
    held_params: str
    looked_up: bool
    """True if the loop looks up K and V for each tile, because registers are scarce."""


@dataclass(frozen=True)
class KeysLoop:
    """A kernel that owns tiles of keys: its range of queries, and the statements for one tile of
    queries.
    """

    range: TileRange
    body: ConsumedTile
    gradient: GradientOfScores
    offs_n: list[Statement]
    begin: list[Statement]
    """The values that a consumer computes for a published tile of keys."""
    shared_prologue: list[Statement]
    """The statements of `begin` that come from the plan."""
    of_dk: KeyConsumer
    """The consumer of dk, if the other consumer has only dv."""
    of_head: list[Statement]
    """The values that a consumer computes for each query head."""
    passed: list[str]
    """The values that the functions of a tile read and do not change."""
    linear: bool
    """True if the log-sum-exp of a query is linear in the query."""
    own_bounds: list[Statement]
    """The statements that find the tiles of this half."""
    past: bool
    ahead: bool
    loops: list[KeyPart]
    q_start: Code
    """The start of the j-th tile of queries."""
    produced: Code
    """The start of the j-th tile of queries in the producer."""
    of_tiles: list[str]
    """The arguments of the loop's function that describe the range."""
    products: KeyProducts
    stored_dk: Code
    stored_dk_rope: Code
    reach: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    """Expressions for the values of a call inside the functions of the loop, by name."""

    @property
    def fixed(self) -> Record:
        """The record of values that the functions of a tile use."""
        return record("DkdvFixed", "fixed", self.passed, self.reach)

    def reached(self, reach: Mapping[str, str]) -> KeysLoop:
        """Return the loop with names as fields of the records of its functions."""
        inner = replace(self, reach=reach).fixed.reach
        assert not inner.keys() & self.body.defines
        body, gradient = reached(self.body, inner), reached(self.gradient, inner)
        return replace(reached(self, reach), body=body, gradient=gradient, reach=reach)

    @property
    def left_out(self) -> list[str]:
        """Names for the numbers of tiles that only the other half needs."""
        return [name for name, there in (("n_ahead", self.ahead), ("n_past", self.past)) if there]


@dataclass(frozen=True)
class _Prologue:
    """The values that are computed for a tile of keys before its loop."""

    shared: list[Statement]
    by_head: list[Statement]
    needed: list[Statement]
    late: list[Statement]
    """The values that the consumer of dk needs. It does not know the tile."""
    used_late: frozenset[str]

    @property
    def all(self) -> list[Statement]:
        """All statements, early and late."""
        return [*self.shared, *self.by_head]


def keys_loop(
    kernel: LoopKernel,
    plan: HopperPlan,
    of: TileLoop,
    kernels: Lowering,
    problem: list[str],
    hidden: frozenset[str],
) -> KeysLoop:
    """Return the kernel of dk and dv. `hidden` identifies keys past an end."""
    tile, gradients = plan.dkdv, kernel.gradients
    assert tile is not None
    assert gradients is not None
    kernel = _with_linear_rest(kernel, plan, of, kernels)
    shared = [of_half(line, "kv") for line in kernel.shared_prologue]
    if uses_of([gradients.factor]) & {"SQ", "SK"}:
        # When dk is stored, the sizes of packed sequences are already the sizes of the next tile.
        shared.append(assign("dk_scale", gradients.factor))
        gradients = replace(gradients, factor=Name("dk_scale"))
    prologue = _prologue(kernel, gradients, shared, plan.split_dkdv, hidden)
    of_tiles = names_of_tile(kernel) | uses_of(kernel.body.lse_lines)
    passed = passed_names(of_tiles, ["b", "h", "kv_idx", *prologue.all], problem)
    ends = ends_of(of)
    found = tile_range(kernel, ends.searches, prologue.all)
    # If one consumer computes dv and the other dk, both have all keys of a tile.
    own = (
        NO_OWN
        if plan.split_dkdv
        else own_range(kernel, ends, prologue.all, prologue.needed, False, tile.BLOCK_M)
    )
    at_the_end = uses_of([gradients.factor]) | hidden
    used = uses_of([*prologue.needed, *own.lines]) | {*passed} | at_the_end
    rows = "BLOCK_N" if plan.split_dkdv else "OWN_N"
    own_shared = [line for line in prologue.needed if line in shared]
    consumer = _consumer(used, own_shared, rows, kernels)
    q_start = start_of_queries(found, begin_of_range(found, "q_lo"))
    gradient = gradient_of_scores(gradients)
    return KeysLoop(
        range=found,
        body=_body(kernel),
        gradient=gradient,
        offs_n=consumer.offs_n,
        begin=consumer.begin,
        shared_prologue=own_shared,
        of_dk=_consumer(prologue.used_late, prologue.late, rows, kernels),
        of_head=[*(line for line in prologue.needed if line in prologue.by_head), *found.blocks],
        passed=passed,
        linear=plan.rest_slope is not None,
        own_bounds=_own_bounds(found, own),
        past=own.past,
        ahead=own.ahead,
        loops=_loops(kernel.body.masked, found, own),
        q_start=q_start,
        produced=q_start if found.listed else start_of_queries(found, found.lo),
        of_tiles=_told_of_range(q_start),
        products=_products(tile, plan.split_dkdv, looked_up=bool(gradient.factor_lines)),
        stored_dk=gradients.scaled("dk"),
        stored_dk_rope=gradients.scaled("dk_rope"),
    )


def _with_linear_rest(
    kernel: LoopKernel, plan: HopperPlan, of: TileLoop, kernels: Lowering
) -> LoopKernel:
    """Return the kernel with a log-sum-exp that is linear in the query, if the plan has its
    slope.
    """
    if plan.rest_slope is None:
        return kernel
    slope = kernels.printer(of).own(plan.rest_slope)
    linear = assign("lse", op("_linear(lse, {0}, offs_m)", slope, fn="linear"))
    return replace(kernel, body=replace(kernel.body, lse_lines=[linear]))


def _prologue(
    kernel: LoopKernel,
    gradients: Gradients,
    shared: list[Statement],
    split: bool,
    hidden: frozenset[str],
) -> _Prologue:
    """Return the values of a tile of keys that its loop, its epilogue and its hidden keys need."""
    by_head = [of_half(line, "kv") for line in kernel.prologue]
    of_tiles = names_of_tile(kernel) | uses_of(kernel.body.lse_lines)
    at_the_end = uses_of([gradients.factor])
    late = needed([*shared, *by_head], at_the_end | hidden)
    return _Prologue(
        shared=shared,
        by_head=by_head,
        needed=needed([*shared, *by_head], (of_tiles if split else of_tiles | at_the_end) | hidden),
        late=late,
        used_late=uses_of(late) | at_the_end | hidden,
    )


def _own_bounds(found: TileRange, own: Own) -> list[Statement]:
    """Return the statements that count the masked tiles that a half skips."""
    lines = [*own.lines]
    masked = "n_masked" if found.has_full else "n_tiles"
    rest: Code = maximum(row("sub", masked, 1), 0)
    if own.ahead:
        fewer: Code = minimum(over(row("sub", "own_lo", "q_lo"), "BLOCK_M"), rest)
        lines.append(assign("n_ahead", maximum(fewer, 0) if own.before else fewer))
    if own.past:
        left = row("sub", rest, "n_ahead") if own.ahead else rest
        left_out = row("sub", "n_tiles", cdiv(row("sub", "own_hi", "q_lo"), "BLOCK_M"))
        lines.append(assign("n_past", minimum(left_out, left)))
    return (
        [line.map(lambda code: from_zero(code, "q_lo")) for line in lines]
        if found.from_start
        else lines
    )


def _loops(masked: bool, found: TileRange, own: Own) -> list[KeyPart]:
    """Return the loops over the tiles of queries of a tile of keys, masked tiles first."""
    n_masked = "n_masked" if found.has_full else "n_tiles"
    loops: list[KeyPart] = []
    if masked:
        ahead = ["n_ahead"] if own.ahead else []
        past = ["n_past"] if own.past else []
        hi = f"{n_masked} - n_past" if own.past else n_masked
        loops.append(KeyPart(True, "n_ahead" if own.ahead else "0", hi, ahead, past))
    if found.has_full:
        loops.append(KeyPart(False, n_masked, "n_tiles"))
    return loops


def _told_of_range(q_start: Code) -> list[str]:
    """Return the arguments of the loop's function that describe the range."""
    used = uses_of([q_start])
    return [n for n in ("q_blocks", "q_lo", *MASKED_TILES, "n_masked", "n_tiles") if n in used]


def _body(kernel: LoopKernel) -> ConsumedTile:
    body = kernel.body
    mask = [line for line in body.mask_lines if line.defines == {"mask"}]
    return ConsumedTile(
        masked=body.masked,
        mask_loads=[],
        mask_lines=[line for line in body.mask_lines if line not in mask],
        mask=mask[0] if mask else None,
        documents=None,
        score_lines=body.score_lines,
        logits=body.logits,
        scaled=body.scaled,
        dead_rows=body.dead_rows,
        lse_lines=body.lse_lines,
    )


def _products(tile: HopperTile, split: bool, looked_up: bool) -> KeyProducts:
    """Return the products of the kernel of dk and dv, and the place of its K and V."""
    if tile.halves:
        return KeyProducts(
            lse_rows="lse_rows",
            delta_rows="delta_rows",
            younger=3,
            columns="BLOCK_M // 2",
            held="k_held, v_held",
            held_params="k, v",
            looked_up=False,
        )
    held = "kv_ring, at_k" if looked_up else "k, v"
    return KeyProducts(
        lse_rows="q_ring.slots.lse.index(slot).reshape([BLOCK_M])",
        delta_rows="q_ring.slots.delta.index(slot).reshape([BLOCK_M])",
        younger=0 if split else 1,
        columns="BLOCK_M",
        held=held,
        held_params=held,
        looked_up=looked_up,
    )


def with_keys_masked(kernel: LoopKernel) -> LoopKernel:
    """Return the kernel of dk and dv with keys past the end masked, because they would add to
    dq.
    """
    ends = op("({0})[:, None]", row("lt", "kv_idx", "SK"))
    lines = [
        line.map(lambda code: row("and", ends, code)) if line.defines == {"mask"} else line
        for line in kernel.body.mask_lines
    ]
    return replace(kernel, body=replace(kernel.body, mask_lines=lines))


def _consumer(
    used: frozenset[str], prologue: list[Statement], rows: str, kernels: Lowering
) -> KeyConsumer:
    """Return a consumer that uses some names of a tile of keys."""
    offs_n = offsets(rows, 1) if "kv_idx" in used else []
    begin = [head_of(used, kernels.packed)]
    if kernels.plan.grouped:
        begin.append(assign("h_kv", over("h", "GQA")))
    if offs_n:
        begin.append(assign("kv_idx", row("add", "kv_start", "offs_n")))
    begin += prologue
    if kernels.packed:
        first = row("add", row("sub", "FAR", "SK"), "kv_start")
        begin.append(Assign(("kv_end", "kv_row"), (row("add", "kv_begin", "SK"), first)))
    return KeyConsumer(offs_n, begin)


def start_of_queries(found: TileRange, lo: Code) -> Code:
    """Return the start of the j-th tile of queries of a tile of keys."""
    if found.listed:
        return op("_listed(j, {0}, BLOCK_M)", "q_blocks")
    first = ZERO if found.head is None else Name("n_first_masked")
    masked = Name("n_masked" if found.has_full else "n_tiles")
    return op("_masked_first(j, {0}, {1}, {2}, {3}, BLOCK_M)", lo, first, masked, "n_tiles")
