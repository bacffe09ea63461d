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
    Common,
    Kernels,
    key_slots,
)
from kgen.kernels.attention.schedules.hopper.key_templates import backward_template
from kgen.kernels.attention.schedules.hopper.launcher import launcher_of
from kgen.kernels.attention.schedules.hopper.plan import HALF
from kgen.kernels.attention.schedules.hopper.portable import Call
from kgen.kernels.attention.schedules.hopper.query_templates import forward_template
from kgen.kernels.attention.schedules.hopper.records import Record
from kgen.kernels.attention.targets.triton.opening import Imported, dependents
from kgen.targets.code import GLUON, Code, Op, Statement, codes, helpers_of, walk
from kgen.targets.launching import ImportsLaunch
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
class Rescaled(Template):
    """The function that rescales accumulators: elements of a thread at a time, and the operands
    with alpha of its two rows.
    """

    template: ClassVar[str] = "attention/hopper/_rescaled.j2"
    language: ClassVar[str] = GLUON

    elements: int

    @property
    def alpha_at(self) -> int:
        """The index of the first row's alpha among the operands."""
        return 2 * self.elements

    @property
    def next_alpha_at(self) -> int:
        """The index of the second row's alpha among the operands."""
        return 2 * self.elements + 2


@dataclass(frozen=True)
class SharedParts(Common, Template):
    """Rings, the tile scheduler, products, and other functions of several kernels."""

    template: ClassVar[str] = "attention/hopper/_shared.j2"
    language: ClassVar[str] = GLUON

    others: str
    """The consumers, in words."""
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
    rescaled: Rescaled | None
    searches_once: bool
    searches: bool


@dataclass(frozen=True)
class HopperFile(ImportsLaunch):
    """`hopper.py`."""

    template: ClassVar[str] = "attention/hopper/hopper.j2"
    import_indent: ClassVar[int] = 0
    language: ClassVar[str] = GLUON

    summary: str
    modules: list[str]
    """The further modules that it imports."""
    of_triton: list[Imported]
    """Imports of names from Triton."""
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
        found.append(forward_template(hopper.common, hopper.forward))
    if hopper.dkdv is not None:
        found.append(backward_template(hopper, hopper.dkdv))
    return [*found, launcher_of(hopper, kernels, call)]


def file_of(
    hopper: Kernels, parts: list[Template], kernels: Lowering, summary: str, gdc: list[str]
) -> HopperFile:
    """Return the template of `hopper.py`."""
    modules = ["torch"] if hopper.forward is not None or not kernels.packed else []
    modules += ["triton"] if hopper.fused is not None else []
    return HopperFile(
        summary=summary,
        modules=modules,
        of_triton=dependents(gdc),
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
        rescaled=Rescaled(min(HALF * common.width // 128, 64))
        if forward is not None and forward.tile.seldom_rescaled
        else None,
        searches_once=any(loop.range.from_first_key is not None for loop in hopper.loops),
        searches=any(loop.range.searches for loop in hopper.loops),
    )


def _imported(hopper: Kernels, kernels: Lowering) -> list[str]:
    """Return the names that `hopper.py` imports from `triton.py`."""
    values = [*codes_in(hopper)]
    used = {name for code in values for name in code.names}
    spelled = [p.spelled[GLUON] for code in values for p in walk(code) if isinstance(p, Op)]
    # Gluon helpers are in `hopper.py`.
    helpers = [s.form.partition("(")[0] for s in spelled if s.helper in kernels.helpers]
    launcher = ["_by_ends"] if kernels.packed else []
    constants = ["LOG2E"]
    constants += ["FAR"] if kernels.packed else []
    constants += ["BLOCK_SIZE"] if kernels.plan.forward.listed else []
    constants += [name.upper() for name in kernels.constants if name.upper() in used]
    return sorted({*constants, *launcher, "_tile_and_head", *helpers})


def codes_in(value: object) -> Iterator[Code]:
    """Yield every `Code` value in nested dataclasses and lists."""
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
