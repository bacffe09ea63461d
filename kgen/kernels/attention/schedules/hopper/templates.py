"""Templates of the Hopper kernels: one for each kernel, the parts that they share, and their launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass
from dataclasses import fields as fields_of
from typing import ClassVar

from kgen.expr.functions import in_order
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.schedules.hopper.kernels import (
    Common,
    DkdvKernel,
    DqKernel,
    DqRings,
    ForwardKernel,
    Kernels,
    key_slots,
)
from kgen.kernels.attention.schedules.hopper.keys import KeyProducts, KeysLoop
from kgen.kernels.attention.schedules.hopper.launcher import launcher_of
from kgen.kernels.attention.schedules.hopper.loops import ConsumedTile
from kgen.kernels.attention.schedules.hopper.operands import KernelOperands, Warpgroup
from kgen.kernels.attention.schedules.hopper.plan import HALF
from kgen.kernels.attention.schedules.hopper.portable import Call
from kgen.kernels.attention.schedules.hopper.queries import QueriesLoop
from kgen.kernels.attention.schedules.hopper.records import Record
from kgen.targets.code import GLUON, Code, Op, Statement, codes, helpers_of, walk
from kgen.targets.template import Template, filled


@dataclass(frozen=True)
class GluonNames(Common, Template):
    """Names that come from Gluon, and layouts."""

    template: ClassVar[str] = "attention/hopper/_gluon_names.j2"
    language: ClassVar[str] = GLUON

    forward: bool
    backward: bool

    @property
    def axes(self) -> int:
        """Number of dimensions of a TMA transfer."""
        return 5 if self.packed else 4


@dataclass(frozen=True)
class Rescaling:
    """The rescaling of accumulators: elements of a thread at a time, and the operands with alpha of its two rows."""

    elements: int

    @property
    def alpha_at(self) -> int:
        """The place of the first row's alpha among the operands."""
        return 2 * self.elements

    @property
    def next_alpha_at(self) -> int:
        """The place of the second row's alpha."""
        return 2 * self.elements + 2


@dataclass(frozen=True)
class SharedParts(Common, Template):
    """Rings, the tile scheduler, products, and other functions of several kernels."""

    template: ClassVar[str] = "attention/hopper/_shared.j2"
    language: ClassVar[str] = GLUON

    others: str
    """Text for the consumers."""
    item_size: int
    """Number of values in a slot of the tile scheduler."""
    forward: bool
    key_slots: Record
    streams_keys: bool
    """True if a kernel owns tiles of queries."""
    skips: bool
    """True if a half skips tiles."""
    queries_in_registers: bool
    biased: bool
    """True if products begin with a bias."""
    linear: bool
    """True if a value is linear in the column of a tile."""
    helpers: list[str]
    rescaling: Rescaling | None
    searches_once: bool
    searches: bool


@dataclass(frozen=True)
class OfQueries(ConsumedTile, QueriesLoop, KernelOperands, Common, Template):
    """The fields of kernels whose programs own tiles of queries."""

    language: ClassVar[str] = GLUON


@dataclass(frozen=True)
class OfForward(ForwardKernel, OfQueries):
    """The fields of forward."""


@dataclass(frozen=True)
class ChainedTiles(OfForward):
    """The loop of two consumers of forward: P @ V of a tile runs during the softmax of the next tile."""

    template: ClassVar[str] = "attention/hopper/_forward_chained.j2"


@dataclass(frozen=True)
class TilesOfThree(OfForward):
    """The loop of three consumers of forward, which process the keys of a tile in two halves."""

    template: ClassVar[str] = "attention/hopper/_forward_three_consumers.j2"


@dataclass(frozen=True)
class Forward(OfForward):
    """Forward, and the producer of tiles of queries."""

    template: ClassVar[str] = "attention/hopper/_forward.j2"

    tiles: ChainedTiles | TilesOfThree = field(kw_only=True)
    """The loop of a consumer."""


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
class DqProducer(OfForward):
    """The producer of dq with separate rings for K and V. Tiles of queries have the ranges of forward."""

    template: ClassVar[str] = "attention/hopper/_dq_producer.j2"


@dataclass(frozen=True)
class Dq(OfDq):
    """The kernel of dq, whose tiles of queries have the ranges of forward."""

    template: ClassVar[str] = "attention/hopper/_dq.j2"

    tiles: DqTiles | DqTilesApart = field(kw_only=True)
    """The loop of a consumer."""
    own_producer: DqProducer | None = field(kw_only=True)


@dataclass(frozen=True)
class OfKeys(KeyProducts, ConsumedTile, KeysLoop, DkdvKernel, KernelOperands, Common, Template):
    """The fields of kernels whose programs own tiles of keys."""

    language: ClassVar[str] = GLUON


@dataclass(frozen=True)
class Dkdv(OfKeys):
    """The kernel of dk and dv, in which each consumer computes both for half of the keys."""

    template: ClassVar[str] = "attention/hopper/_dkdv.j2"


@dataclass(frozen=True)
class SplitDkdv(OfKeys):
    """The kernel of dk and dv, in which one consumer computes dk and the other dv."""

    template: ClassVar[str] = "attention/hopper/_dkdv_split.j2"

    dk_consumer: Warpgroup = field(kw_only=True)


@dataclass(frozen=True)
class Fused(OfKeys):
    """dq, dk and dv in one kernel."""

    template: ClassVar[str] = "attention/hopper/_backward_fused.j2"

    columns_guard: str | None = field(kw_only=True)
    """The guard of the columns of dq."""
    strides_o: str = field(kw_only=True)
    """The strides of dq, as parameters."""


@dataclass(frozen=True)
class Backward(OfKeys):
    """The backward kernels, with the producer of tiles of keys."""

    template: ClassVar[str] = "attention/hopper/_backward.j2"

    of_queries: Dq | None = field(kw_only=True)
    of_keys: Template = field(kw_only=True)


@dataclass(frozen=True)
class HopperFile(Template):
    """`hopper.py`."""

    template: ClassVar[str] = "attention/hopper/hopper.j2"
    language: ClassVar[str] = GLUON

    summary: str
    uses_torch: bool
    uses_triton: bool
    gdc: list[str]
    """The functions of programmatic dependent launch."""
    imported: list[str]
    """The names that it imports from `triton.py`."""
    names: GluonNames
    parts: list[Template]


def names_of(hopper: Kernels) -> GluonNames:
    """Return names and layouts of the kernels of a plan."""
    forward, backward = hopper.forward is not None, hopper.dkdv is not None
    return filled(GluonNames, hopper.common, forward=forward, backward=backward)


def parts_of(hopper: Kernels, kernels: Lowering, call: Call) -> list[Template]:
    """Return the templates of all kernels of a plan, of their shared parts, and of their launch."""
    found: list[Template] = [_shared_parts(hopper, kernels)]
    if hopper.forward is not None:
        found.append(_forward(hopper.common, hopper.forward))
    if hopper.dkdv is not None:
        found.append(_backward(hopper, hopper.dkdv))
    return [*found, launcher_of(hopper, kernels, call)]


def file_of(
    hopper: Kernels, parts: list[Template], kernels: Lowering, summary: str, gdc: list[str]
) -> HopperFile:
    """Return the template of `hopper.py`."""
    return HopperFile(
        summary=summary,
        uses_torch=hopper.forward is not None or not kernels.packed,
        uses_triton=hopper.fused is not None,
        gdc=gdc,
        imported=_imported(hopper, kernels),
        names=names_of(hopper),
        parts=parts,
    )


def _shared_parts(hopper: Kernels, kernels: Lowering) -> SharedParts:
    common, forward = hopper.common, hopper.forward
    tiles = [kernel.published for kernel in (forward, hopper.dkdv) if kernel is not None]
    chained = forward is not None and forward.tile.chained
    linear = any(loop.bias is not None for loop in hopper.of_queries)
    return filled(
        SharedParts,
        common,
        others="two others" if forward is None or chained else "the others",
        item_size=max(tile.size for tile in tiles),
        forward=forward is not None,
        key_slots=key_slots(common.k),
        streams_keys=bool(hopper.of_queries),
        skips=any(loop.past or loop.ahead for loop in hopper.loops),
        queries_in_registers=forward is not None and forward.tile.queries_in_registers,
        biased=linear,
        linear=linear or (hopper.dkdv is not None and hopper.dkdv.loop.linear),
        helpers=in_order(helpers_of(codes_in(hopper), GLUON) - kernels.helpers),
        rescaling=Rescaling(min(HALF * common.width // 128, 64))
        if forward is not None and forward.tile.seldom_rescaled
        else None,
        searches_once=any(loop.range.from_first_key is not None for loop in hopper.loops),
        searches=any(loop.range.searches for loop in hopper.loops),
    )


def _forward(common: Common, forward: ForwardKernel) -> Forward:
    bases = (forward, forward.loop, forward.loop.body, forward.operands, common)
    tiles = filled(ChainedTiles if forward.tile.chained else TilesOfThree, *bases)
    return filled(Forward, *bases, tiles=tiles)


def _dq(common: Common, forward: ForwardKernel, dq: DqKernel) -> Dq:
    bases = (dq.rings, dq, dq.loop, dq.loop.body, dq.operands, common)
    apart = dq.rings.apart
    producer = filled(DqProducer, dq.operands, forward, forward.loop, forward.loop.body, common)
    tiles = filled(DqTilesApart if apart else DqTiles, *bases)
    return filled(Dq, *bases, tiles=tiles, own_producer=producer if apart else None)


def _backward(hopper: Kernels, dkdv: DkdvKernel) -> Backward:
    common, fused, loop = hopper.common, hopper.fused, dkdv.loop
    of_queries = None
    if hopper.dq is not None:
        assert hopper.forward is not None
        of_queries = _dq(common, hopper.forward, hopper.dq)
    bases = (dkdv, loop.products, loop, loop.body, dkdv.operands, common)
    of_keys: Template = filled(SplitDkdv if dkdv.split else Dkdv, *bases)
    if fused is not None:
        guard, strides = fused.columns_guard, fused.strides_o
        of_keys = filled(Fused, fused.operands, *bases, columns_guard=guard, strides_o=strides)
    return filled(Backward, *bases, of_queries=of_queries, of_keys=of_keys)


def _imported(hopper: Kernels, kernels: Lowering) -> list[str]:
    """The names that `hopper.py` imports from `triton.py`."""
    values = [*codes_in(hopper)]
    used = {name for code in values for name in code.names}
    spelled = [p.spelled[GLUON] for code in values for p in walk(code) if isinstance(p, Op)]
    # Helpers of Gluon are in `hopper.py`.
    helpers = [s.form.partition("(")[0] for s in spelled if s.helper in kernels.helpers]
    launcher = ["_by_ends"] if kernels.packed else []
    constants = ["LOG2E"]
    constants += ["FAR"] if kernels.packed else []
    constants += ["BLOCK_SIZE"] if kernels.plan.forward.listed else []
    constants += [name.upper() for name in kernels.constants if name.upper() in used]
    return sorted({*constants, *launcher, "_tile_and_head", *helpers})


def codes_in(value: object) -> Iterator[Code]:
    """Every value within dataclasses and lists."""
    if isinstance(value, Code):
        yield value
    elif isinstance(value, Statement):
        yield from codes([value])
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for part in value:
            yield from codes_in(part)
    elif is_dataclass(value):
        for one in fields_of(value):
            yield from codes_in(getattr(value, one.name))
