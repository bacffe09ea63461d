"""The Triton target of chunk_output, which emits one file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kgen.expr.functions import in_order
from kgen.kernels.chunk_output.plan.planning import ChunkOutputPlan, plan_chunk_output
from kgen.kernels.chunk_output.plan.tiles import Tile, tile_tables
from kgen.kernels.chunk_output.targets.interface import Formula, formula, signature
from kgen.kernels.chunk_output.targets.triton.kernels import (
    Forward,
    KeyGradients,
    ValueGradients,
    kernels,
)
from kgen.kernels.chunk_output.targets.triton.launcher import (
    Launcher,
    Shapes,
    docstring,
    launcher,
    shapes,
)
from kgen.spec.load import Loaded
from kgen.targets import Source, opening
from kgen.targets.launching import ImportsLaunch, LaunchFunctions, launching_of, modules_of
from kgen.targets.triton import tables as by_chip
from kgen.targets.triton.tritons import OLDEST_TRITON, OldestTriton


@dataclass(frozen=True)
class TileRow:
    """The tile shape of some chips, or of all other chips if it names none."""

    chips: str
    """The chips, as a Python tuple."""
    tile: str
    """The keyword arguments of a launch."""


@dataclass(frozen=True)
class TileTable:
    """The tile shapes of a kernel by chip."""

    name: str
    rows: list[TileRow]


@dataclass(frozen=True)
class Module(ImportsLaunch):
    """`triton.py`."""

    template: ClassVar[str] = "chunk_output/triton/chunk_output.j2"

    name: str
    summary: str
    K: int
    V: int
    BT: int
    dtype: str
    formula: Formula
    shapes: Shapes
    gate_shapes: list[str]
    usage: str
    natural: bool
    """True if the base of the decay is e."""
    varlen: bool
    oldest: OldestTriton
    tile_tables: list[TileTable]
    helpers: list[str]
    """Texts of helper functions that the kernels call."""
    forward: Forward
    dvdh: ValueGradients | None
    dqdk: KeyGradients | None
    launcher: Launcher
    modules: list[str]
    """The modules of the standard library that the file imports."""
    launching: LaunchFunctions | None
    """The functions of all launchers, if the file contains their text."""


def sources(loaded: Loaded) -> list[Source]:
    """Return the one file of this target."""
    plan = plan_chunk_output(loaded)
    return [
        Source(
            "triton.py",
            module(plan, single=False),
            rank=1,
            alone=module(plan, single=True),
            launches=True,
            signature=signature(plan),
            docstring=docstring(plan),
        )
    ]


def module(plan: ChunkOutputPlan, *, single: bool) -> Module:
    """Return the file of a plan."""
    spec, helpers = plan.spec, set[str]()
    natural = plan.exponent is not None and plan.natural
    own = kernels(plan, helpers)
    of_gates = {"g": "g [B, T, HV]", "g_gamma": "g_gamma [HV]"}
    return Module(
        name=spec.name,
        summary=opening(spec),
        K=spec.head_dim.qk,
        V=spec.head_dim.v,
        BT=spec.chunk_size,
        dtype=spec.dtype,
        formula=formula(plan),
        shapes=shapes(spec),
        gate_shapes=[of_gates[gate] for gate in plan.gates],
        usage=signature(plan).usage,
        natural=natural,
        varlen=spec.varlen,
        oldest=OLDEST_TRITON,
        tile_tables=_tile_tables(plan),
        helpers=in_order(helpers),
        forward=own.forward,
        dvdh=own.dvdh,
        dqdk=own.dqdk,
        launcher=launcher(plan, launching_of(single)),
        modules=modules_of(launching_of(single), *(["math"] if natural else [])),
        launching=launching_of(single),
    )


def _tile_tables(plan: ChunkOutputPlan) -> list[TileTable]:
    found = tile_tables(plan.spec)
    named = {"_FORWARD_TILES": found.forward}
    if plan.backward:
        named |= {"_DVDH_TILES": found.dvdh, "_DQDK_TILES": found.dqdk}
    return [TileTable(name, _rows(table)) for name, table in named.items()]


def _rows(table: Mapping[int, Tile]) -> list[TileRow]:
    rows = by_chip.rows({chip: [tile] for chip, tile in table.items()})
    return [TileRow(str(chips), tile.spelled) for chips, tile in rows]
