"""The Triton target of norms, which emits one file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from kgen.expr.functions import in_order
from kgen.kernels.norm.plan.planning import NormPlan, plan_norm
from kgen.kernels.norm.plan.tiles import NormTile, norm_tiles
from kgen.kernels.norm.targets.arguments import norm_signature
from kgen.kernels.norm.targets.formula import formula
from kgen.kernels.norm.targets.triton.kernels import BackwardKernel, ForwardKernel, Kernels
from kgen.kernels.norm.targets.triton.launcher import Launchers
from kgen.kernels.norm.targets.triton.launcher_templates import Launcher
from kgen.spec.load import Loaded
from kgen.targets import Source, opening
from kgen.targets.launching import ImportsLaunch, LaunchFunctions, launching_of, modules_of
from kgen.targets.triton import tables as by_chip
from kgen.targets.triton.tritons import OLDEST_TRITON, OldestTriton


@dataclass(frozen=True)
class Constant:
    """A constant of kernels."""

    name: str
    value: str


@dataclass(frozen=True)
class Tiles:
    """The tile shapes of some chips, or of all other chips if it names none."""

    chips: tuple[int, ...]
    tiles: tuple[NormTile, ...]


@dataclass(frozen=True)
class TileTable:
    """The tile shapes of a kernel."""

    name: str
    rows: tuple[Tiles, ...]


@dataclass(frozen=True)
class Module(ImportsLaunch):
    """`triton.py`."""

    template: ClassVar[str] = "norm/triton/norm.j2"

    name: str
    summary: str
    formula: tuple[str, ...]
    usage: str
    returned: str
    oldest: OldestTriton
    optional: bool
    """True if an operator accepts None for a tensor."""
    constants: tuple[Constant, ...]
    tables: tuple[TileTable, ...]
    helpers: tuple[str, ...]
    shared: bool
    """True if several programs share a row."""
    totals: bool
    """True if the programs of a row add single values."""
    forward: ForwardKernel
    backward: BackwardKernel | None
    launcher: Launcher
    modules: list[str]
    """The modules of the standard library that the file imports."""
    launching: LaunchFunctions | None
    """The functions of all launchers, if the file contains their text."""


def sources(loaded: Loaded) -> list[Source]:
    """Return the one file of this target."""
    plan = plan_norm(loaded)
    text = _module(plan, single=False)
    function = text.launcher.function
    return [
        Source(
            "triton.py",
            text,
            rank=1,
            alone=_module(plan, single=True),
            launches=True,
            signature=norm_signature(plan),
            docstring=function.docstring,
        )
    ]


def _module(plan: NormPlan, *, single: bool) -> Module:
    spec, kernels, launchers = plan.spec, Kernels(plan), Launchers(plan)
    # Kernels are printed first, because this finds the helpers that they call.
    forward, backward = kernels.forward(), kernels.backward()
    return Module(
        name=spec.name,
        summary=opening(spec),
        formula=tuple(formula(plan)),
        usage=norm_signature(plan).usage,
        returned=launchers.returned,
        oldest=OLDEST_TRITON,
        optional=plan.backward is not None and plan.stores_h,
        constants=tuple(_constants(plan)),
        tables=tuple(_tables(plan)),
        helpers=tuple(in_order(kernels.printer.helpers)),
        shared=spec.heads is None,
        totals=not plan.layer or (backward is not None and bool(backward.rows)),
        forward=forward,
        backward=backward,
        launcher=launchers.launcher(launching_of(single)),
        modules=modules_of(launching_of(single), "math"),
        launching=launching_of(single),
    )


def _constants(plan: NormPlan) -> Iterator[Constant]:
    quantize = plan.spec.quantize
    if quantize is not None:
        yield Constant("FP8_MAX", "448.0")
        if quantize.scale == "per_row":
            yield Constant("TINY", "2.0**-110")
    for name, param in plan.spec.params.items():
        if not param.runtime:
            yield Constant(name.upper(), repr(param.value))


def _tables(plan: NormPlan) -> Iterator[TileTable]:
    tables = {"_FORWARD_TILES": norm_tiles(plan.spec, "forward", plan.forward.loads)}
    if plan.backward:
        loads = (*plan.backward.loads, *plan.upstream)
        tables["_BACKWARD_TILES"] = norm_tiles(plan.spec, "backward", loads)
    for name, table in tables.items():
        rows = by_chip.rows({chip: [tiles] for chip, tiles in table.items()})
        yield TileTable(name, tuple(Tiles(chips, tiles) for chips, tiles in rows))
