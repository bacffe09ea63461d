"""The head of an emitted attention file: its docstring, imports, and the definitions that kernels
share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from kgen.kernels.attention.spec import AttentionSpec
from kgen.kernels.attention.targets.triton.placement import Placement
from kgen.targets.launching import LaunchFunctions
from kgen.targets.template import Template
from kgen.targets.triton import tables
from kgen.targets.triton.tritons import OLDEST_TRITON, OldestTriton

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Tile = TypeVar("_Tile", bound="DataclassInstance")


@dataclass(frozen=True)
class Opening(Placement, Template):
    """The docstring and the imports of a file."""

    template: ClassVar[str] = "attention/triton/_opening.j2"

    name: str
    summary: str
    computed: str
    """The formula of out."""
    formula: str
    """The expressions that the formula names."""
    width_qk: int
    width_v: int
    kv_shapes: str
    dtype: str
    tensors: list[str]
    """The tensors of an example call."""
    usage_args: list[str]
    by_tma: bool
    """True if tiles may be for TMA."""
    modules: list[str]
    """The Python modules that the file imports."""
    launching: LaunchFunctions | None
    """The launcher functions, if the file contains their source."""
    typing: list[str]
    """The names imported from `typing`."""
    gdc: list[str]
    """The functions for programmatic dependent launch."""
    oldest: OldestTriton = OLDEST_TRITON


@dataclass(frozen=True)
class Constant:
    """A compile-time parameter."""

    name: str
    value: str


@dataclass(frozen=True)
class TileRow:
    """A tile, and its chips. Without chips, the tile is for every chip."""

    chips: tuple[int, ...]
    fields: str
    """The tile as arguments of a launch."""


@dataclass(frozen=True)
class TileTable:
    """The tiles of a kernel."""

    name: str
    rows: list[TileRow]


@dataclass(frozen=True)
class Prelude(Placement, Template):
    """Constants, tiles, and functions that several kernels call."""

    template: ClassVar[str] = "attention/triton/_prelude.j2"

    block_size: int | None
    """The size of a block mask's blocks."""
    constants: list[Constant]
    tile_tables: list[TileTable]
    many_queries: bool
    """True if some kernel serves many queries."""
    tf32: bool
    helpers: list[str]


def computed_of(spec: AttentionSpec) -> str:
    """Return the formula of out."""
    scores = "scale * q @ k^T"
    if spec.score_mod is not None:
        scores = f"score_mod({scores})"
    return f"softmax({scores}) @ v" + ", over the keys that mask_mod allows" * (
        spec.mask_mod is not None
    )


def formula_of(spec: AttentionSpec) -> str:
    """Return the expressions that the formula of out names, with compile-time parameters as
    numbers.
    """
    values = {name: param.value for name, param in spec.params.items() if param.value is not None}
    lines: list[str] = []
    for label in ("score_mod", "mask_mod"):
        text = getattr(spec, label)
        if text is not None:
            first, *rest = (line.with_values(values).in_docstring() for line in text.lines())
            lines += [f"{label} = {first}", *(" " * (len(label) + 3) + line for line in rest)]
    if spec.sinks:
        lines.append("softmax: exp(sinks[h]) is one more term of each row's sum, without a value")
    return "\n".join(lines)


def table_of(
    name: str,
    table: Mapping[int, Sequence[_Tile]],
    fields: Callable[[_Tile], Mapping[str, object]] = asdict,
) -> TileTable:
    """Return the table of tiles by chip. `fields` are the launch arguments of a tile."""
    rows = [(chips, fields(tile)) for chips, tile in tables.rows(table)]
    return TileTable(
        name,
        [
            TileRow(chips, ", ".join(f"{name}={value}" for name, value in of.items()))
            for chips, of in rows
        ],
    )
