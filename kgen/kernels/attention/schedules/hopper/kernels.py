"""The Hopper kernels: the values of their templates, except loops and operands."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from kgen.kernels.attention.lowered.model import Gradients, RowGradient
from kgen.kernels.attention.lowered.row_max import RowResults
from kgen.kernels.attention.schedules.hopper.keys import KeysLoop
from kgen.kernels.attention.schedules.hopper.loops import GradientOfScores
from kgen.kernels.attention.schedules.hopper.operands import (
    KernelOperands,
    Lag,
    Operands,
    PublishedTile,
)
from kgen.kernels.attention.schedules.hopper.plan import HopperPlan, HopperTile
from kgen.kernels.attention.schedules.hopper.queries import HiddenKeys, QueriesLoop
from kgen.kernels.attention.schedules.hopper.reads import Columns, Pages
from kgen.kernels.attention.schedules.hopper.records import Record, reached, record
from kgen.kernels.attention.schedules.hopper.rows import VECTORS, Rows
from kgen.kernels.attention.schedules.hopper.streams import Stream
from kgen.targets.code import (
    Assign,
    Code,
    Name,
    Repeat,
    Run,
    Statement,
    assign,
    op,
    row,
    text,
    total,
)


@dataclass(frozen=True)
class ColumnsOfKeys:
    """Columns of Q and K within the width of V, or the rope columns, whose products have separate
    sums.
    """

    suffix: str
    """The end of the names of their tiles."""
    columns: int
    layout: str
    """The layout of a sum over rows."""
    keys: str
    """The function that returns a tile of keys."""
    words: str


def next_item(dynamic: bool, counter: Code) -> list[Statement | str]:
    """Return the statement by which a producer gets its next tile, with a comment."""
    programs = op("{tl}.num_programs(0)")
    if not dynamic:
        return [Assign(("number",), (programs,), sign="+=")]
    taken = op('{tl}.atomic_add({0}, 1, sem="relaxed")', counter)
    return [
        "# Tiles differ in length, so a program that has finished takes the next number.",
        assign("number", row("add", taken, programs)),
    ]


@dataclass(frozen=True)
class Common(Rows):
    """The fields that all Hopper kernels of one plan share."""

    packed: bool
    grouped: bool
    kv_head: str
    kv_heads: str
    listed: bool
    dynamic: bool
    """True if programs take tiles from a counter."""
    problem: Record
    """The arguments of the problem that kernels pass to functions, except compile-time
    constants.
    """
    problem_params: list[str]
    no_specialize: str
    width: int
    """Columns of a tile."""
    rope: int
    """Rope columns of Q and K, which have their own tiles."""
    q: list[str]
    """The tiles of Q."""
    k: list[str]
    vectors: Code
    """The offset of a head's rows in log-sum-exp and delta."""
    consumers: int
    """Number of consumers of forward."""
    streams: list[Stream]
    hidden_keys: list[HiddenKeys]
    """The keys past an end that only the mask of a tile excludes, if there are any."""

    @property
    def sums(self) -> list[ColumnsOfKeys]:
        """The columns of Q and K in tiles."""
        own = ColumnsOfKeys("", self.width, "OUT", "_keys", "K of tile i")
        rope = ColumnsOfKeys(
            "_rope", self.rope, "ROPE", "_rope_keys", "the rope dims of K of tile i"
        )
        return [own, rope] if self.rope else [own]

    @property
    def of_heads(self) -> bool:
        """True if programs process the batches of one head in sequence."""
        return bool(self.streams) and all(s.of_heads for s in self.streams)


@dataclass(frozen=True)
class RingAt:
    """A ring that a consumer reads alternately with another ring, and the number of the tile."""

    name: str
    at: Code

    def before(self, fewer: int) -> Code:
        """Return the number of the tile that is `fewer` tiles before."""
        return row("sub", self.at, fewer) if fewer else self.at


@dataclass(frozen=True)
class SkippedRings:
    """The rings from which a half releases tiles that only the other half needs."""

    ring: str
    beside: list[RingAt] = field(default_factory=list)

    def skip(self, n: str, fewer: int = 0) -> Statement:
        """Return the statement that skips `n` tiles. The number of a tile is `fewer` less in other
        rings.
        """
        if not self.beside:
            return self._skip(n)
        others = (Run(_skipped(ring.name, ring.before(fewer), 1)) for ring in self.beside)
        why = "in the order in which the producer loads them"
        return Repeat(Name(n), (*others, self._skip(1)), why)

    def _skip(self, n: str | int) -> Statement:
        return assign("n_used", _skipped(self.ring, Name("n_used"), n))


def _skipped(ring: str, at: Code, n: str | int) -> Code:
    """Return the call that releases `n` tiles of a ring, and returns the number of the next one."""
    return op("_consumer_skip({0}, {1}, {2})", ring, at, n)


@dataclass(frozen=True)
class ForwardKernel(RowResults):
    """Forward, with the producer of tiles of queries."""

    tile: HopperTile
    loop: QueriesLoop
    published: PublishedTile
    """The fields of a tile of queries that the producer publishes, here and in dq."""
    last_masked: Code
    """Number of masked tiles at the end of a tile's range."""
    operands: KernelOperands
    pages: Pages
    unpaged: HiddenKeys | None
    """The test for keys that are on no page. None without pages."""
    lag: Lag
    key_slots: Record
    columns_of_out: Columns
    lanes: list[int]
    """Threads of a warp along a row, with eight elements each, and the number of rows."""
    k_bytes: str
    next_item: list[Statement | str]
    """The statement by which the producer gets its next tile."""
    skipped: SkippedRings
    sink_load: Code | None
    on_dead_rows: str
    """The results of rows without a visible key, for a comment."""

    @property
    def fraction(self) -> str:
        """The fraction of a tile of queries that one consumer processes, in words."""
        return {2: "half", 3: "third"}[self.tile.consumers]

    @property
    def skips_past(self) -> list[Statement]:
        """The statements that skip tiles at the end of the range. Only the other half needs
        these tiles.
        """
        return [self.skipped.skip("n_past")] if self.loop.past else []

    @property
    def skips_ahead(self) -> list[Statement]:
        """The statements that skip tiles at the start of the range. Only the other half needs
        these tiles.
        """
        return [self.skipped.skip("n_ahead", 1)] if self.loop.ahead else []

    @property
    def columns(self) -> str:
        """Number of keys whose scores a consumer computes at a time."""
        return "BLOCK_N" if self.tile.chained else "BLOCK_N // 2"

    @property
    def carried(self) -> str:
        """The names of the loop-carried values."""
        ahead = "p, " if self.tile.chained else ""
        return f"{ahead}{', '.join(['m_i', 'l_i', *self.top])}, acc, n_used"

    @property
    def alpha(self) -> list[str]:
        """The results of a tile's softmax other than P, m_i and l_i."""
        return [*self.top, *([] if self.tile.bounded else ["alpha"])]

    @property
    def row_sum(self) -> str:
        """The sum of a row. With bounded logits, m_i is finite even in a row that sees no key."""
        return "l_i" if self.tile.bounded else "l_safe"


@dataclass(frozen=True)
class MaskedLate:
    """The values that one late mask sets to zero: the products of dS, and the sums over keys."""

    products: list[Statement]
    names: list[str]
    sums: list[Statement]


@dataclass(frozen=True)
class DqKernel:
    """dq, and gradients of buffers that are sums over keys."""

    tile: HopperTile
    loop: QueriesLoop
    published: PublishedTile
    """The fields of a tile of queries that the producer publishes."""
    gradient: GradientOfScores
    late: MaskedLate | None
    dqk: str
    operands: KernelOperands
    lse: Statement
    delta: Statement
    """The loads of log-sum-exp and delta, one number for each row."""
    row_gradients: tuple[RowGradient, ...]
    row_sums: list[str]
    stored: list[Statement]
    """The stores of dq, which use the slots of the tiles of Q."""
    key_slots: Record
    sums_over_keys: list[Statement]
    """The stores of gradients of buffers."""
    rings: DqRings
    also: list[str]
    """The gradients of buffers that the kernel computes, in words."""

    @property
    def carried(self) -> str:
        """The names of the loop-carried values."""
        return ", ".join([*self.rings.products_carried, *self.row_sums])

    @property
    def skips_past(self) -> list[Statement]:
        """The statements that skip tiles at the end of the range. Only the other half needs
        these tiles.
        """
        return [self.rings.skipped.skip("n_past")] if self.loop.past else []

    @property
    def skips_ahead(self) -> list[Statement]:
        """The statements that skip tiles at the start of the range. Only the other half needs
        these tiles.
        """
        return [self.rings.skipped.skip("n_ahead")] if self.loop.ahead else []

    @property
    def docstring(self) -> list[str]:
        """The docstring of the kernel."""
        results = " ".join(["Compute dq", *self.also])
        of = "A tile has BLOCK_M query rows of one (b, h). A program processes many tiles"
        return textwrap.wrap(f'"""{results}. {of}."""', 112)


@dataclass(frozen=True)
class DqRings:
    """The rings of K and V in dq, and the loop-carried values.

    The values include dS of the previous tile, if shared memory has room for its K.
    """

    named_rings: Statement
    """The statement that names the rings in the consumer."""
    key_rings: list[str]
    held_queries: list[str]
    """The slots of Q and dO in the loop."""
    products_carried: list[str]
    skipped: SkippedRings
    dq_sums: str
    """The accumulators of dq, as comma-separated names."""
    dq_products: str
    younger: int
    """Number of products that start after dP."""
    apart: bool
    """True if K and V have separate rings. Then no tile is computed before the loop."""


def rings_of_dq(plan: HopperPlan) -> DqRings:
    """Return the rings of dq."""
    rope = ["q_rope"] if plan.rope else []
    own = ["dq", *(f"d{x}" for x in rope)]
    apart = plan.dq_rings_apart
    rings = ["k_ring", "v_ring"] if apart else ["kv_ring"]
    bound = ["q_ring", *(f"{x}_ring" for x in rope), "do_ring", *rings]
    return DqRings(
        named_rings=Assign(tuple(bound), tuple(Name(f"args.{ring}") for ring in bound)),
        key_rings=rings,
        held_queries=["q_ring", "do_ring", "CONSUMER"] if apart else ["q", *rope, "do"],
        products_carried=["dq", "n_used"] if apart else ["ds", *own, "n_used"],
        skipped=SkippedRings("v_ring", [RingAt("k_ring", Name("n_used"))])
        if apart
        else SkippedRings("kv_ring"),
        dq_sums=", ".join(own),
        dq_products=", ".join(f"{x}_async" for x in own),
        younger=2 if rope else 1,
        apart=apart,
    )


def stored_in_place(x: str, gradients: Gradients, operands: Operands) -> list[Statement]:
    """Return the store of dq, which uses the slot of the tile of Q or of its rope columns."""
    name, scaled = f"d{x}", reached(gradients.scaled(f"d{x}"), operands.reach)
    at = "(2 * i + CONSUMER) % 2"
    form = f"_store_tile(args.{name}_desc, [{operands.rows.at_q}, 0], {x}_ring.slots, {at}, {{0}})"
    return [Run(op(form, scaled))]


def stored_keys(x: str, slots: str, scaled: Code, rows: Rows) -> Statement:
    """Return the store of dk or dv, which uses the slot of a released tile."""
    return Run(op(f"_store_tile(args.{x}_desc, [{rows.stored_at}, 0], {slots}, {{0}})", scaled))


def key_slots(k: list[str], values: str = "SLOTS", paged: int | None = None) -> Record:
    """Return the slots of K and V.

    With `paged`, a tile of that many columns consists of several pages.
    """
    names, slots = [k[0], "v", *k[1:]], {"v": values}

    def made(x: str) -> str:
        if paged is None:
            return f"_slots({x}_desc, {slots.get(x, 'SLOTS')})"
        shape = f"[{slots.get(x, 'SLOTS')}, 1, 1, BLOCK_N, {paged}]"
        return f"gl.allocate_shared_memory({x}_desc.dtype, {shape}, {x}_desc.layout)"

    return record("KeySlots", "kv_slots", names, {x: made(x) for x in names})


def late_of(gradients: Gradients, late: bool) -> MaskedLate | None:
    """Return the values that the late mask sets to zero, or None."""
    return MaskedLate(gradients.products, gradients.masked_late, gradients.sums) if late else None


@dataclass(frozen=True)
class StreamedQueries:
    """The tensors that are loaded for each tile of queries, in one ring: Q, dO, log-sum-exp and
    delta.
    """

    slots: Record
    """The slots of the ring, by tensor."""
    writers: int
    """Number of writers of a slot: TMA, and the producer for vectors at unaligned addresses."""
    nbytes: Statement
    """The statement that counts the bytes of a tile that TMA loads."""


def streamed_queries(operands: Operands) -> StreamedQueries:
    """Return the tensors that are loaded for each tile of queries."""
    rope, packed = operands.q[1:], operands.packed
    nbytes = ["2 * args.q_desc.block_type.nbytes"]
    if not packed:
        nbytes.append("2 * args.lse_desc.block_type.nbytes")
    nbytes += [f"args.{x}_desc.block_type.nbytes" for x in rope]
    names = ["q", "do", "lse", "delta", *rope]
    made = {
        x: f"_slots({desc}, SLOTS)" for x, desc in zip(names, operands.query_descs, strict=True)
    }
    if packed:
        made |= dict.fromkeys(VECTORS, "_vector_slots(BLOCK_M, SLOTS)")
    return StreamedQueries(
        slots=record("QuerySlots", "q_slots", names, made),
        writers=2 if packed else 1,
        nbytes=assign("NBYTES: tl.constexpr", total(*map(text, nbytes))),
    )


@dataclass(frozen=True)
class DkdvKernel:
    """dk and dv, with the producer of tiles of keys."""

    tile: HopperTile
    loop: KeysLoop
    published: PublishedTile
    """The fields of a tile of keys that the producer publishes."""
    operands: KernelOperands
    queries: StreamedQueries
    split: bool
    """True if one consumer computes dv, and the other dk."""
    head_columns: int
    next_item: list[Statement | str]
    """The statement by which the producer gets its next tile."""
    held_keys: list[str]
    """The names of K in the loop of dv."""
    store_dk: Statement
    """The store of dk, which uses the slot of K or V."""
    store_dk_rope: Statement
    with_dq: bool
    """True if the plan also has one kernel for dq, dk and dv."""


@dataclass(frozen=True)
class FusedKernel:
    """dq, dk and dv in one kernel."""

    tile: HopperTile
    operands: KernelOperands
    columns_guard: str | None
    """The guard of the columns of dq."""
    strides_of_dq: str
    """The strides of dq, as parameters."""


@dataclass(frozen=True)
class BackwardOperands:
    """The arguments of `backward_on_hopper` other than the inputs."""

    operands: list[str]
    gradients: list[str]

    @property
    def descs(self) -> list[str]:
        """The descriptors of tensors that all kernels load in tiles of 64 rows."""
        return [f"{x}_desc" for x in ["q", "k", "v", "do", *self.gradients]]


@dataclass(frozen=True)
class Kernels:
    """All Hopper kernels of a plan."""

    plan: HopperPlan
    common: Common
    forward: ForwardKernel | None
    dq: DqKernel | None
    dkdv: DkdvKernel | None
    fused: FusedKernel | None

    @property
    def dynamic(self) -> bool:
        """True if programs take tiles from a counter."""
        return self.common.dynamic

    @property
    def streams(self) -> list[Stream]:
        """The tensors that forward loads for each tile of keys in addition to K and V."""
        return self.common.streams

    @property
    def streamed(self) -> list[str]:
        """The tensors of the streams."""
        return [s.tensor for s in self.streams]

    @property
    def backward(self) -> BackwardOperands:
        """The arguments of `backward_on_hopper` other than the inputs."""
        gradients = [*(["dq"] if self.dq is not None else []), "dk", "dv"]
        ahead = ["counters"] if self.dynamic else []
        ahead += ["dq_sum"] if self.fused is not None else []
        sums = self.dq.row_sums if self.dq is not None else []
        return BackwardOperands([*ahead, *gradients, *sums], gradients)

    @property
    def loops(self) -> Sequence[QueriesLoop | KeysLoop]:
        """The loops of all kernels."""
        return [of.loop for of in (self.forward, self.dq, self.dkdv) if of is not None]

    @property
    def of_queries(self) -> Sequence[QueriesLoop]:
        """The loops of kernels that own tiles of queries."""
        return [of.loop for of in (self.forward, self.dq) if of is not None]
