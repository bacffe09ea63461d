"""Templates of the Hopper kernels whose programs own tiles of queries: forward and dq."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kgen.kernels.attention.lowered.row_max import RowResults
from kgen.kernels.attention.schedules.hopper.kernels import Common, DqKernel, DqRings, ForwardKernel
from kgen.kernels.attention.schedules.hopper.loops import ConsumedTile
from kgen.kernels.attention.schedules.hopper.operands import KernelOperands
from kgen.kernels.attention.schedules.hopper.queries import HiddenKeys, QueriesLoop
from kgen.kernels.attention.schedules.hopper.reads import Pages
from kgen.targets.code import GLUON, Statement, assign
from kgen.targets.folding import Bracketed
from kgen.targets.template import Template, filled


@dataclass(frozen=True)
class OfQueries(ConsumedTile, QueriesLoop, KernelOperands, Common, Template):
    """The fields of kernels whose programs own tiles of queries."""

    language: ClassVar[str] = GLUON


@dataclass(frozen=True)
class OfForward(ForwardKernel, OfQueries):
    """The fields of forward."""


@dataclass(frozen=True)
class OfProducer(OfForward):
    """The fields of a producer of tiles of queries."""

    @property
    def head_of_keys(self) -> list[str]:
        """The statement that finds the KV head."""
        return ["h_kv = h // GQA"] if self.grouped else []

    @property
    def last_query(self) -> list[Statement]:
        """The statement that finds the last query of a tile, if its range depends on it."""
        return self.range.last_position("q", "BLOCK_M", self.SQ)

    @property
    def first_masked(self) -> list[Statement]:
        """The number of masked tiles at the start of the range."""
        return self.range.masked_at_start("BLOCK_N")

    @property
    def masked_at_end(self) -> list[Statement]:
        """The number of masked tiles at the end of the range, if consumers need it."""
        return [assign("n_last_masked", self.last_masked)] if self.published.masks_last else []


@dataclass(frozen=True)
class Softmax(OfForward):
    """The softmax of a tile, which follows the running maximum of each row."""

    template: ClassVar[str] = "attention/hopper/_forward_softmax.j2"
    optional_fields: ClassVar[tuple[str, ...]] = (*RowResults.optional_fields, "previous_maximum")

    @property
    def previous_maximum(self) -> str:
        """The maximum of each row before a tile: `m_i`, or the exact one that calls return."""
        return "".join([*(f"{row.value} if {row.option} else " for row in self.followed), "m_i"])


@dataclass(frozen=True)
class BoundedSoftmax(OfForward):
    """The softmax of bounded logits, which subtracts the maximum of a row's first tile."""

    template: ClassVar[str] = "attention/hopper/_forward_softmax_bounded.j2"
    optional_fields: ClassVar[tuple[str, ...]] = (*RowResults.optional_fields, "returned_words")

    @property
    def returned_words(self) -> str:
        """The results of a tile, in words."""
        *others, last = ["P", "m_i", "the next l_i", *self.top]
        return f"{', '.join(others)} and {last}"


@dataclass(frozen=True)
class ChainedTiles(OfForward):
    """The loop of two consumers: P @ V of a tile runs during the softmax of the next tile."""

    template: ClassVar[str] = "attention/hopper/_forward_chained.j2"

    softmax: Softmax | BoundedSoftmax = field(kw_only=True)

    @property
    def rescaled(self) -> list[str]:
        """The statement that rescales the sums if the maximum of a row changed."""
        line = "acc = _rescaled(acc, gl.convert_layout(alpha, gl.SliceLayout(1, OUT))[:, None])"
        return [line] if self.tile.seldom_rescaled else []


@dataclass(frozen=True)
class TilesOfThree(OfForward):
    """The loop of three consumers of forward, which process the keys of a tile in two halves."""

    template: ClassVar[str] = "attention/hopper/_forward_three_consumers.j2"


@dataclass(frozen=True)
class LoadPages(Pages, Template):
    """The function that loads a tile of keys from pages."""

    template: ClassVar[str] = "attention/hopper/_load_pages.j2"
    language: ClassVar[str] = GLUON

    kv_head: str = field(kw_only=True)
    hidden: HiddenKeys = field(kw_only=True)
    """The keys that are on no page."""


@dataclass(frozen=True)
class ClearHidden(Template):
    """The function that sets hidden keys of a tile to zero."""

    template: ClassVar[str] = "attention/hopper/_clear_hidden.j2"
    language: ClassVar[str] = GLUON

    hidden: HiddenKeys
    lanes: list[int]


@dataclass(frozen=True)
class ForwardProducer(OfProducer):
    """The producer of tiles of queries."""

    template: ClassVar[str] = "attention/hopper/_forward_producer.j2"

    @property
    def page_bounds(self) -> list[Statement]:
        """The statements that find the keys that are on no page."""
        return self.unpaged.needed if self.unpaged is not None else []

    @property
    def start_of_loads(self) -> list[Statement]:
        """The start of a tile of K, which V also needs, unless it is read from a list."""
        return [] if self.listed else [assign("kv_start", self.kv_start)]

    @property
    def start_of_load(self) -> list[Statement]:
        """The start of a tile of K that is read from a list."""
        return [assign("kv_start", self.kv_start)] if self.listed else []

    @property
    def load_k(self) -> list[str]:
        """The statements that start the loads of a tile of K."""
        if self.unpaged is not None:
            return [self._load_pages("k", "kv_start", self.unpaged)]
        whole = f"async_load(args.k_desc, [{self.at_kv}, 0], full, k_slot)"
        rope = [
            "k_rope_slots = kv_ring.slots.k_rope",
            "k_rope_slot = k_rope_slots.index(n_fetched % k_rope_slots.shape[0])",
            f"async_load(args.k_rope_desc, [{self.at_kv}, 0], full, k_rope_slot)",
        ]
        return [whole, *rope] if self.rope else [whole]

    @property
    def load_v(self) -> list[Statement | str]:
        """The statements that start the load of a tile of V."""
        start = assign("v_start", self.v_start)
        if self.unpaged is not None:
            return [start, self._load_pages("v", "v_start", self.unpaged)]
        return [start, f"async_load(args.v_desc, [{self.at_v}, 0], full, v_slot)"]

    def _load_pages(self, x: str, start: str, unpaged: HiddenKeys) -> str:
        given = ", ".join([start, "b", self.kv_head, "args", *unpaged.given, "BLOCK_N"])
        return f"_load_pages({x}_slot, full, args.{x}_desc, {given})"

    @property
    def counter_wait(self) -> list[Statement]:
        """The statements that wait before the producer uses the counter of tiles."""
        return [self.lag.counter_wait] if self.dynamic else []


@dataclass(frozen=True)
class FirstTile(OfForward):
    """The first tile of keys of two consumers. It overlaps no product of a previous tile."""

    template: ClassVar[str] = "attention/hopper/_forward_first_tile.j2"

    @property
    def cleared_keys(self) -> list[str]:
        """The statements that clear hidden keys before the scores."""
        return [
            line
            for hidden in self.hidden_keys
            if hidden.of_scores
            for line in (
                "# Several scores share a reciprocal, so a NaN in one would reach the others.",
                hidden.cleared("_keys(kv_ring, n_used)", "kv_start"),
            )
        ]


@dataclass(frozen=True)
class Forward(OfForward):
    """Forward, and the producer of tiles of queries."""

    template: ClassVar[str] = "attention/hopper/_forward.j2"
    optional_fields: ClassVar[tuple[str, ...]] = (*RowResults.optional_fields, "computed_words")

    load_pages: LoadPages | None = field(kw_only=True)
    query_producer: ForwardProducer = field(kw_only=True)
    clear_hidden: list[ClearHidden] = field(kw_only=True)
    tiles: ChainedTiles | TilesOfThree = field(kw_only=True)
    """The loop of a consumer."""
    first_tile: FirstTile | None = field(kw_only=True)

    @property
    def computed_words(self) -> str:
        """The results of the kernel, in words."""
        return f"{self.written_words} of each row" if self.row_results else self.written_words

    @property
    def item_kept(self) -> list[Statement]:
        """The number of the item, for the rings of streams."""
        return [assign("item", "i")] if self.streams else []

    @property
    def first_kv_start(self) -> list[Statement]:
        """The start of the tile that is processed before the loops."""
        return [assign("kv_start", self.first_start)] if self.tile.chained else []

    @property
    def read_queries(self) -> list[str]:
        """The statements that wait for the queries of a tile."""
        at = f"{self.consumers} * i + CONSUMER"
        if not self.tile.queries_in_registers:
            return [f"{x} = _consumer_tile(args.{x}_ring, {at})" for x in self.q]
        return [
            "# For few keys, reading the operands takes as long as the product. "
            "With q in registers, half as much is read.",
            *(
                f"{x} = _consumer_load(args.{x}_ring, {at}, gl.DotOperandLayout(0, SCORES, 2))"
                for x in self.q
            ),
        ]

    @property
    def released_queries(self) -> list[str]:
        """The statements that release Q after the last product."""
        of = [] if self.tile.queries_in_registers else self.q
        return [f"_consumer_release(args.{x}_ring, {self.consumers} * i + CONSUMER)" for x in of]

    @property
    def cleared_values(self) -> list[Statement | str]:
        """The statements that clear hidden values of the first tile."""
        cleared = [
            hidden.cleared("_values(kv_ring, n_used)", "v_start") for hidden in self.hidden_keys
        ]
        if not cleared:
            return []
        start = assign("v_start", self.first_start)
        return ["_consumer_wait(kv_ring, n_used)", start, *cleared]

    @property
    def last_product(self) -> list[str]:
        """The statements that start the product of the last tile, if it is not in the loop."""
        if not self.tile.chained:
            return []
        product = "acc_async = _async_dot(acc, p, _values(kv_ring, n_used), OUT)"
        return ["_consumer_wait(kv_ring, n_used)", product]

    @property
    def last_product_added(self) -> list[str]:
        """The statements that wait for the product of the last tile."""
        if not self.tile.chained:
            return []
        wait = "acc = warpgroup_mma_wait(0, deps=[acc_async])"
        return [wait, "_consumer_release(kv_ring, n_used)", "n_used += 1"]


@dataclass(frozen=True)
class OfDq(DqRings, DqKernel, OfQueries):
    """The fields of the kernel of dq."""


@dataclass(frozen=True)
class DqTiles(OfDq):
    """The loop of dq, in which the product of the previous tile runs while dS is computed."""

    template: ClassVar[str] = "attention/hopper/_dq_tiles.j2"


@dataclass(frozen=True)
class DqTilesApart(OfDq):
    """The loop of dq with separate rings for K and V."""

    template: ClassVar[str] = "attention/hopper/_dq_tiles_apart.j2"


@dataclass(frozen=True)
class DqProducer(OfProducer):
    """The producer of dq with separate rings for K and V. It has the ranges of forward."""

    template: ClassVar[str] = "attention/hopper/_dq_producer.j2"


@dataclass(frozen=True)
class DqFirstTile(OfDq):
    """The first tile of keys, which has no previous tile whose product could run meanwhile."""

    template: ClassVar[str] = "attention/hopper/_dq_first_tile.j2"


@dataclass(frozen=True)
class DqBeforeTilesApart(OfDq):
    """The waits before the loop with separate rings for K and V."""

    template: ClassVar[str] = "attention/hopper/_dq_before_tiles_apart.j2"


@dataclass(frozen=True)
class Dq(OfDq):
    """The kernel of dq, whose tiles of queries have the ranges of forward."""

    template: ClassVar[str] = "attention/hopper/_dq.j2"

    tiles: DqTiles | DqTilesApart = field(kw_only=True)
    """The loop of a consumer."""
    before_tiles: DqFirstTile | DqBeforeTilesApart = field(kw_only=True)
    own_producer: DqProducer | None = field(kw_only=True)

    @property
    def last_product(self) -> list[str]:
        """The lines of the last tile's product, if it is not in the loop."""
        if self.apart:
            return []
        keys = {of: f"{of.keys}(kv_ring, n_used - 1), {of.layout}" for of in self.sums}
        return [
            *(
                f"dq{of.suffix}_async = _async_dot(dq{of.suffix}, ds, {k})"
                for of, k in keys.items()
            ),
            f"{self.dq_sums} = warpgroup_mma_wait(0, deps=[{self.dq_products}])",
            "_consumer_release(kv_ring, n_used - 1)",
        ]

    @property
    def rings_of_keys(self) -> list[Bracketed | str]:
        """The statements that build the rings of K and V."""
        if not self.apart:
            return [self.key_slots.made, "kv_ring = _ring(kv_slots, SLOTS, 2, 2)"]
        k, v = "_ring(_slots(k_desc, SLOTS), SLOTS, 1, 2)", "_ring(_slots(v_desc, 1), 1, 1, 2)"
        return [f"k_ring, v_ring = {k}, {v}"]


def forward_template(common: Common, forward: ForwardKernel) -> Forward:
    bases = (forward, forward.loop, forward.loop.body, forward.operands, common)
    chained, unpaged = forward.tile.chained, forward.unpaged
    pages = None
    if unpaged is not None:
        pages = filled(LoadPages, forward.pages, kv_head=common.kv_head, hidden=unpaged)
    return filled(
        Forward,
        *bases,
        load_pages=pages,
        query_producer=filled(ForwardProducer, *bases),
        clear_hidden=[ClearHidden(hidden, forward.lanes) for hidden in common.hidden_keys],
        tiles=_tiles(forward, bases),
        first_tile=filled(FirstTile, *bases) if chained else None,
    )


def _tiles(forward: ForwardKernel, bases: Sequence[object]) -> ChainedTiles | TilesOfThree:
    """Return the loop of a consumer of forward."""
    if not forward.tile.chained:
        return filled(TilesOfThree, *bases)
    softmax = filled(BoundedSoftmax if forward.tile.bounded else Softmax, *bases)
    return filled(ChainedTiles, *bases, softmax=softmax)


def dq_template(common: Common, forward: ForwardKernel, dq: DqKernel) -> Dq:
    bases = (dq.rings, dq, dq.loop, dq.loop.body, dq.operands, common)
    apart = dq.rings.apart
    producer = filled(DqProducer, dq.operands, forward, forward.loop, forward.loop.body, common)
    return filled(
        Dq,
        *bases,
        tiles=filled(DqTilesApart if apart else DqTiles, *bases),
        before_tiles=filled(DqBeforeTilesApart if apart else DqFirstTile, *bases),
        own_producer=producer if apart else None,
    )
