"""Templates of the Hopper kernels whose programs own tiles of keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from kgen.kernels.attention.schedules.hopper.kernels import Common, DkdvKernel, Kernels
from kgen.kernels.attention.schedules.hopper.keys import KeyProducts, KeysLoop
from kgen.kernels.attention.schedules.hopper.loops import ConsumedTile
from kgen.kernels.attention.schedules.hopper.operands import KernelOperands, Warpgroup
from kgen.kernels.attention.schedules.hopper.query_templates import Dq, dq_template
from kgen.targets.code import GLUON, Statement
from kgen.targets.template import Template, filled


@dataclass(frozen=True)
class OfKeys(KeyProducts, ConsumedTile, KeysLoop, DkdvKernel, KernelOperands, Common, Template):
    """The fields of kernels whose programs own tiles of keys."""

    language: ClassVar[str] = GLUON


@dataclass(frozen=True)
class DkdvTiles(OfKeys):
    """The loop of dk and dv, which processes the queries of a tile at once."""

    template: ClassVar[str] = "attention/hopper/_dkdv_tiles.j2"


@dataclass(frozen=True)
class DkdvTilesInHalves(OfKeys):
    """The loop of dk and dv, which processes the queries of a tile in two halves."""

    template: ClassVar[str] = "attention/hopper/_dkdv_tiles_in_halves.j2"


@dataclass(frozen=True)
class Dkdv(OfKeys):
    """The kernel of dk and dv, in which each consumer computes both for half of the keys."""

    template: ClassVar[str] = "attention/hopper/_dkdv.j2"

    tiles: DkdvTiles | DkdvTilesInHalves = field(kw_only=True)
    """The loop of a consumer."""

    @property
    def keys_ready(self) -> list[str]:
        """The statements that wait for K and V."""
        if self.looked_up:
            return ["_consumer_wait(kv_ring, at_k)", "_consumer_wait(kv_ring, at_v)"]
        return ["k, v = _consumer_tile(kv_ring, at_k), _consumer_tile(kv_ring, at_v)"]

    @property
    def keys_in_registers(self) -> list[str]:
        """The statements that load K and V into registers."""
        if not self.tile.halves:
            return []
        k, v = (f"{x}.load(gl.DotOperandLayout(0, SCORES, 2))" for x in "kv")
        return [
            "# For few queries, reading the operands takes as long as the product. "
            "With k and v in registers, only q and dO",
            "# are read.",
            f"k_held, v_held = {k}, {v}",
        ]


@dataclass(frozen=True)
class SplitDkdv(OfKeys):
    """The kernel of dk and dv, in which one consumer computes dk and the other dv."""

    template: ClassVar[str] = "attention/hopper/_dkdv_split.j2"

    dk_consumer: Warpgroup = field(kw_only=True)

    @property
    def scores(self) -> list[str]:
        """The statements that start the products of the scores."""
        rope = "qk_async = _async_dot_nt_plus(qk_async, k_rope, _slot(q_ring.slots.q_rope, slot))"
        return ["qk_async = _async_dot_nt(k, q, SCORES)", *([rope] if self.rope else [])]

    @property
    def rope_released(self) -> list[str]:
        """The statement that releases the rope columns of K."""
        return ["_consumer_release(args.k_rope_ring, done)"] if self.rope else []

    @property
    def rope_ring(self) -> list[str]:
        """The statement that builds the ring of rope columns of K."""
        return ["k_rope_ring = _ring(_slots(k_rope_desc, 1), 1, 1, 2)"] if self.rope else []


@dataclass(frozen=True)
class Fused(OfKeys):
    """dq, dk and dv in one kernel."""

    template: ClassVar[str] = "attention/hopper/_backward_fused.j2"

    columns_guard: str | None = field(kw_only=True)
    """The guard of the columns of dq."""
    strides_of_dq: str = field(kw_only=True)
    """The strides of dq, as parameters."""


@dataclass(frozen=True)
class KeyLoads(OfKeys):
    """The loads of whole tiles of K and V."""

    template: ClassVar[str] = "attention/hopper/_key_loads.j2"

    @property
    def rope_loads(self) -> list[str]:
        """The statements that load the rope columns of K."""
        if not self.rope:
            return []
        load = f"    args.k_rope_ring, done, args.k_rope_desc, [{self.at_kv}, 0],"
        return ["_producer_load(", load, ")"]


@dataclass(frozen=True)
class KeyLoadsInHalves(OfKeys):
    """The loads of halves of tiles of K and V."""

    template: ClassVar[str] = "attention/hopper/_key_loads_in_halves.j2"


@dataclass(frozen=True)
class Backward(OfKeys):
    """The backward kernels, with the producer of tiles of keys."""

    template: ClassVar[str] = "attention/hopper/_backward.j2"

    of_queries: Dq | None = field(kw_only=True)
    of_keys: Template = field(kw_only=True)
    key_loads: KeyLoads | KeyLoadsInHalves = field(kw_only=True)

    @property
    def last_key(self) -> list[Statement]:
        """The statement that finds the last key of a tile, if its range depends on it."""
        return self.range.last_position("kv", "BLOCK_N", self.SK)

    @property
    def first_masked(self) -> list[Statement]:
        """The number of masked tiles at the start of the range."""
        return self.range.masked_at_start("BLOCK_M")


def backward_template(hopper: Kernels, dkdv: DkdvKernel) -> Backward:
    common, fused, loop = hopper.common, hopper.fused, dkdv.loop
    of_queries = None
    if hopper.dq is not None:
        assert hopper.forward is not None
        of_queries = dq_template(common, hopper.forward, hopper.dq)
    bases = (dkdv, loop.products, loop, loop.body, dkdv.operands, common)
    of_keys: SplitDkdv | Fused | Dkdv
    if dkdv.split:
        of_keys = filled(SplitDkdv, *bases)
    elif fused is not None:
        guard, strides = fused.columns_guard, fused.strides_of_dq
        of_keys = filled(Fused, fused.operands, *bases, columns_guard=guard, strides_of_dq=strides)
    else:
        tiles = filled(DkdvTilesInHalves if dkdv.tile.halves else DkdvTiles, *bases)
        of_keys = filled(Dkdv, *bases, tiles=tiles)
    loads = filled(KeyLoads if dkdv.split else KeyLoadsInHalves, *bases)
    return filled(Backward, *bases, of_queries=of_queries, of_keys=of_keys, key_loads=loads)
