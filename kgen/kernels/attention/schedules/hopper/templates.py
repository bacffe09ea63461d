"""Templates of the Hopper kernels: one for each kernel, the parts that they share, and their
launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from dataclasses import fields as fields_of
from typing import ClassVar

from kgen.expr.functions import in_order
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.schedules.hopper.kernels import (
    BackwardOperands,
    Common,
    DkdvKernel,
    DqKernel,
    ForwardKernel,
    FusedKernel,
    Kernels,
    key_slots,
)
from kgen.kernels.attention.schedules.hopper.operands import Warpgroup
from kgen.kernels.attention.schedules.hopper.plan import HALF, HopperPlan
from kgen.kernels.attention.schedules.hopper.portable import Call
from kgen.kernels.attention.schedules.hopper.reads import Columns, columns_of
from kgen.kernels.attention.schedules.hopper.records import Record
from kgen.kernels.attention.targets.triton.placement import programs
from kgen.targets.code import GLUON, Code, Op, Statement, codes, helpers_of, walk
from kgen.targets.template import Template


@dataclass(frozen=True)
class GluonNames(Template):
    """Names that come from Gluon, and layouts."""

    template: ClassVar[str] = "attention/hopper/_gluon_names.j2"
    language: ClassVar[str] = GLUON

    common: Common
    forward: bool
    backward: bool

    @property
    def axes(self) -> int:
        """Number of dimensions of a TMA transfer."""
        return 5 if self.common.packed else 4


@dataclass(frozen=True)
class Rescaling:
    """The rescaling of accumulators: elements of a thread at a time, and the operands with alpha of
    its two rows.
    """

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
class SharedParts(Template):
    """Rings, the tile scheduler, products, and other functions of several kernels."""

    template: ClassVar[str] = "attention/hopper/_shared.j2"
    language: ClassVar[str] = GLUON

    common: Common
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
class ChainedTiles(Template):
    """The loop of two consumers of forward: P @ V of a tile runs during the softmax of the next
    tile.
    """

    template: ClassVar[str] = "attention/hopper/_forward_chained.j2"
    language: ClassVar[str] = GLUON

    common: Common
    forward: ForwardKernel


@dataclass(frozen=True)
class TilesOfThree(Template):
    """The loop of three consumers of forward, which process the keys of a tile in two halves."""

    template: ClassVar[str] = "attention/hopper/_forward_three_consumers.j2"
    language: ClassVar[str] = GLUON

    forward: ForwardKernel


@dataclass(frozen=True)
class Forward(Template):
    """Forward, and the producer of tiles of queries."""

    template: ClassVar[str] = "attention/hopper/_forward.j2"
    language: ClassVar[str] = GLUON

    common: Common
    forward: ForwardKernel
    tiles: ChainedTiles | TilesOfThree
    """The loop of a consumer."""


@dataclass(frozen=True)
class DqTiles(Template):
    """The loop of dq, in which the product of the previous tile runs while dS is computed."""

    template: ClassVar[str] = "attention/hopper/_dq_tiles.j2"
    language: ClassVar[str] = GLUON

    common: Common
    dq: DqKernel


@dataclass(frozen=True)
class DqTilesApart(Template):
    """The loop of dq with separate rings for K and V."""

    template: ClassVar[str] = "attention/hopper/_dq_tiles_apart.j2"
    language: ClassVar[str] = GLUON

    dq: DqKernel


@dataclass(frozen=True)
class Dq(Template):
    """The kernel of dq, whose tiles of queries have the ranges of forward."""

    template: ClassVar[str] = "attention/hopper/_dq.j2"
    language: ClassVar[str] = GLUON

    common: Common
    forward: ForwardKernel
    dq: DqKernel
    tiles: DqTiles | DqTilesApart
    """The loop of a consumer."""


@dataclass(frozen=True)
class Dkdv(Template):
    """The kernel of dk and dv, in which each consumer computes both for half of the keys."""

    template: ClassVar[str] = "attention/hopper/_dkdv.j2"
    language: ClassVar[str] = GLUON

    common: Common
    dkdv: DkdvKernel


@dataclass(frozen=True)
class SplitDkdv(Template):
    """The kernel of dk and dv, in which one consumer computes dk and the other dv."""

    template: ClassVar[str] = "attention/hopper/_dkdv_split.j2"
    language: ClassVar[str] = GLUON

    common: Common
    dkdv: DkdvKernel
    dk_consumer: Warpgroup


@dataclass(frozen=True)
class Fused(Template):
    """dq, dk and dv in one kernel."""

    template: ClassVar[str] = "attention/hopper/_backward_fused.j2"
    language: ClassVar[str] = GLUON

    common: Common
    dkdv: DkdvKernel
    fused: FusedKernel


@dataclass(frozen=True)
class Backward(Template):
    """The backward kernels, with the producer of tiles of keys."""

    template: ClassVar[str] = "attention/hopper/_backward.j2"
    language: ClassVar[str] = GLUON

    common: Common
    dkdv: DkdvKernel
    of_queries: Dq | None
    of_keys: Template


@dataclass(frozen=True)
class OneKernel:
    """The condition for one backward kernel, when it is faster than two."""

    params: str
    given: str
    enough: str
    sizes: list[str]
    """Lines that compute the sizes."""


@dataclass(frozen=True)
class Programs:
    """The number of tiles of each kernel."""

    forward: str
    dq: str
    dkdv: str
    sums: str
    """Number of tiles of the sums of dq."""


@dataclass(frozen=True)
class Launcher(Template):
    """The functions that launch Hopper kernels."""

    template: ClassVar[str] = "attention/hopper/_launcher.j2"
    language: ClassVar[str] = GLUON

    common: Common
    columns: Columns
    forward: ForwardKernel | None
    dq: DqKernel | None
    dkdv: DkdvKernel | None
    fused: FusedKernel | None
    backward: BackwardOperands
    one: OneKernel | None
    programs: Programs
    call: Call
    forward_group: int
    """Number of heads that forward processes at a time."""
    half: int = HALF

    @property
    def forward_options(self) -> list[str]:
        """The options of forward's launch."""
        return ["launch_pdl=True"] if self.common.dynamic else []

    @property
    def short_dkdv(self) -> bool:
        """True if tiles of dk and dv have fewer queries than the shared descriptor."""
        return self.dkdv is not None and self.dkdv.tile.BLOCK_M < HALF


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
    return GluonNames(hopper.common, hopper.forward is not None, hopper.dkdv is not None)


def parts_of(hopper: Kernels, kernels: Lowering, call: Call) -> list[Template]:
    """Return the templates of all kernels of a plan, of their shared parts, and of their launch."""
    found: list[Template] = [_shared_parts(hopper, kernels)]
    if hopper.forward is not None:
        found.append(_forward(hopper.common, hopper.forward))
    if hopper.dkdv is not None:
        found.append(_backward(hopper, hopper.dkdv))
    return [*found, _launcher(hopper, kernels, call)]


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
    return SharedParts(
        common=common,
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
    chained = forward.tile.chained
    return Forward(
        common, forward, ChainedTiles(common, forward) if chained else TilesOfThree(forward)
    )


def _backward(hopper: Kernels, dkdv: DkdvKernel) -> Backward:
    common, of_queries = hopper.common, None
    if hopper.dq is not None:
        assert hopper.forward is not None
        tiles = DqTilesApart(hopper.dq) if hopper.dq.rings.apart else DqTiles(common, hopper.dq)
        of_queries = Dq(common, hopper.forward, hopper.dq, tiles)
    dk = dkdv.operands.dk_consumer
    of_keys: Template = SplitDkdv(common, dkdv, dk) if dk is not None else Dkdv(common, dkdv)
    if hopper.fused is not None:
        of_keys = Fused(common, dkdv, hopper.fused)
    return Backward(common, dkdv, of_queries, of_keys)


def _launcher(hopper: Kernels, kernels: Lowering, call: Call) -> Launcher:
    plan = hopper.plan
    return Launcher(
        common=hopper.common,
        columns=columns_of(plan, kernels.spec.head_dim.v),
        forward=hopper.forward,
        dq=hopper.dq,
        dkdv=hopper.dkdv,
        fused=hopper.fused,
        backward=hopper.backward,
        one=_one_kernel(plan, kernels) if hopper.fused is not None else None,
        programs=_programs(plan, kernels),
        call=call,
        forward_group=max(plan.heads, call.group),
    )


def _programs(plan: HopperPlan, kernels: Lowering) -> Programs:
    packed, grouped = kernels.packed, kernels.plan.grouped
    return Programs(
        forward=programs(packed, grouped, "q", "BLOCK_M"),
        dq=programs(packed, grouped, "q", str(2 * HALF)),
        dkdv=programs(packed, grouped, "kv", str(plan.dkdv.BLOCK_N if plan.dkdv else 0)),
        sums=programs(packed, grouped, "q", str(HALF)),
    )


def _one_kernel(plan: HopperPlan, kernels: Lowering) -> OneKernel:
    """Return the condition for one backward kernel, when it is faster than two.

    Its zeros and sums cost the same for every query, even if it sees few keys. If tiles differ in
    length, two kernels are better with few tiles: dq fills the multiprocessors that the kernel of
    dk and dv leaves idle.
    """
    enough, grouped = f"SK >= {plan.least_keys}", kernels.plan.grouped
    if not plan.dynamic:
        return OneKernel("SK", "SK", enough, ["SK = k.shape[2]"])
    enough += " and 2 * n_tiles >= 3 * _multiprocessors(device)"
    sizes = ["HKV, SK = k.shape[1], k.shape[2]"] if grouped else ["SK = k.shape[2]"]
    tiles = programs(kernels.packed, grouped, "kv", str(2 * HALF))
    return OneKernel("SK, n_tiles, device", f"SK, {tiles}, q.device", enough, sizes)


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
