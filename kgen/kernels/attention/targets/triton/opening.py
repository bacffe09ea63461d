"""The head of an emitted file of attention: its docstring, what it imports, and what kernels have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

from kgen.kernels.attention.plan.decode import DecodePlan, DecodeTile
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.plan.tuned import Tile
from kgen.kernels.attention.spec import AttentionSpec
from kgen.kernels.attention.targets.triton.placement import Placement
from kgen.targets.launching import LaunchFunctions
from kgen.targets.template import Template
from kgen.targets.triton import tables
from kgen.targets.triton.tritons import OLDEST_TRITON, OldestTriton


@dataclass(frozen=True)
class Opening(Template):
    """The docstring of a file, and what it imports."""

    template: ClassVar[str] = "attention/triton/_opening.j2"

    name: str
    summary: str
    formula: str
    at: Placement
    width_qk: int
    width_v: int
    kv_shapes: str
    dtype: str
    tensors: list[str]
    """The tensors of an example call."""
    usage_args: list[str]
    by_tma: bool
    """True where tiles may be for TMA."""
    modules: list[str]
    """The modules of Python that it imports."""
    launching: LaunchFunctions | None
    """The functions of launchers, if the file has their text."""
    typing: list[str]
    """The names imported from `typing`."""
    gdc: list[str]
    """The functions that let a kernel begin beside the end of the one before it."""
    oldest: OldestTriton = OLDEST_TRITON


@dataclass(frozen=True)
class Constant:
    """A compile-time parameter."""

    name: str
    value: str


@dataclass(frozen=True)
class TileRow:
    """A tile, and the chips that it is for; every chip where it names none."""

    chips: tuple[int, ...]
    fields: str
    """The tile as arguments of a launch."""


@dataclass(frozen=True)
class TileTable:
    """The tiles of a kernel."""

    name: str
    rows: list[TileRow]


@dataclass(frozen=True)
class Prelude(Template):
    """Constants, tiles, and functions that several kernels call."""

    template: ClassVar[str] = "attention/triton/_prelude.j2"

    at: Placement
    block_size: int | None
    """The size of a block mask's blocks."""
    constants: list[Constant]
    tile_tables: list[TileTable]
    many_queries: bool
    """True where some kernel takes many queries."""
    tf32: bool
    helpers: list[str]


def formula_of(spec: AttentionSpec) -> str:
    lines = []
    for label in ("score_mod", "mask_mod"):
        text = getattr(spec, label)
        if text is not None:
            first, *rest = (line.in_docstring() for line in text.lines())
            lines += [f"{label} = {first}", *(" " * (len(label) + 3) + line for line in rest)]
    if spec.sinks:
        lines.append("softmax: exp(sinks[h]) is one more term of each row's sum, without a value")
    return "\n".join(lines) or "score_mod = score"


def tile_tables(plan: AttentionPlan, decode: DecodePlan | None) -> list[TileTable]:
    named: dict[str, Mapping[int, Sequence[Tile | DecodeTile]]] = {}
    if decode is None or not decode.alone:
        named["_FORWARD_TILES"] = plan.tiles.forward
    if decode is not None:
        named["_DECODE_TILES"] = {chip: [tile] for chip, tile in decode.tiles.items()}
    if plan.backward:
        named |= {"_DQ_TILES": plan.tiles.dq, "_DKDV_TILES": plan.tiles.dkdv}
    if plan.pairs:
        named["_PAIR_TILES"] = plan.tiles.pair
    if plan.diagonals:
        named["_DIAGONAL_TILES"] = plan.tiles.diagonal
    return [
        TileTable(name, [TileRow(chips, _fields(name, tile)) for chips, tile in tables.rows(table)])
        for name, table in named.items()
    ]


def _fields(table: str, tile: Tile | DecodeTile) -> str:
    """A tile as the arguments of a launch."""
    fields = asdict(tile)
    if table in ("_PAIR_TILES", "_DIAGONAL_TILES"):
        del fields["TMA"]
    if table == "_DIAGONAL_TILES":
        fields = {"BLOCK": fields.pop("BLOCK_M")} | fields
        del fields["BLOCK_N"]
    return ", ".join(f"{name}={value}" for name, value in fields.items())
