"""The head of an emitted attention file: its docstring, imports, and the definitions that kernels
share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from kgen.kernels.attention.spec import AttentionSpec
from kgen.kernels.attention.targets.triton.placement import Placement
from kgen.targets.code import Statement, assign, text
from kgen.targets.launching import LaunchFunctions
from kgen.targets.template import Template
from kgen.targets.triton import tables
from kgen.targets.triton.tritons import OLDEST_TRITON, OldestTriton

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Tile = TypeVar("_Tile", bound="DataclassInstance")


@dataclass(frozen=True)
class Imported:
    """Names that a file imports from a module."""

    module: str
    names: list[str]


def imported(module: str, names: Iterable[str]) -> list[Imported]:
    """Return the import of names, if there are any."""
    found = [*names]
    return [Imported(module, found)] if found else []


def dependents(names: Iterable[str]) -> list[Imported]:
    """Return the import of functions for programmatic dependent launch, if there are any."""
    return imported("triton.language.extra.cuda", names)


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
    gqa_words: str
    dtype: str
    tensors: list[str]
    """The tensors of an example call."""
    usage_args: list[str]
    modules: list[str]
    """The Python modules that the file imports."""
    launching: LaunchFunctions | None
    """The launcher functions, if the file contains their source."""
    standard: list[Imported]
    """Imports of names from the standard library."""
    of_triton: list[Imported]
    """Imports of names from Triton."""
    oldest: OldestTriton = OLDEST_TRITON


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
class TileAndHead(Template):
    """The function that finds the tile and the head of a program."""

    template: ClassVar[str] = "attention/triton/_tile_and_head.j2"


@dataclass(frozen=True)
class PackedTile(Template):
    """The function that finds the sequence and the tile of a slot."""

    template: ClassVar[str] = "attention/triton/_tile_of_slot.j2"


@dataclass(frozen=True)
class Tf32Dot(Template):
    """The functions that round to TF32 and multiply."""

    template: ClassVar[str] = "attention/triton/_tf32_dot.j2"


@dataclass(frozen=True)
class Prelude(Template):
    """Constants, tiles, and functions that several kernels call."""

    template: ClassVar[str] = "attention/triton/_prelude.j2"

    constants: list[Statement]
    tile_tables: list[TileTable]
    by_tma: bool
    """True if a row of a table may have TMA=True."""
    functions: list[Template]
    """The functions that several kernels call, except helpers of expressions."""
    helpers: list[str]


def constant(name: str, value: str, note: str = "") -> Statement:
    """Return the definition of a constant that kernels read; `note` is a comment after it."""
    return assign(name, text(f"tl.constexpr({value})"), note)


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
    if lines and spec.aligned_to_end:
        keys = "kv_lens[b]" if spec.per_batch else "SK"
        lines.append(f"q_idx of query i = {keys} - SQ + i")
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
