"""The parts that the forward and the backward kernel of a norm in CUDA share, for their
templates.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.kernels.norm.plan.shapes import Shape
from kgen.targets.code import Code, Statement


@dataclass(frozen=True)
class Slots:
    """The part of a stage of the ring that holds one tensor."""

    name: str
    element: str
    slots: str
    """The C++ type of its slots."""
    begin: str
    """The offset of the part."""

    @property
    def end(self) -> str:
        return f"{self.slots}::END"


@dataclass(frozen=True)
class Column:
    """A tensor that varies by column."""

    name: str
    element: str
    address: str
    """The address of the first column, for the head of a block's rows."""
    row_address: str
    """The address of the first column, for the head of a row."""


@dataclass(frozen=True)
class RowValue:
    """A value of a whole row."""

    name: str
    type: str
    value: Code
    zero: str


@dataclass(frozen=True)
class Read:
    """A tensor that some lines read."""

    name: str


@dataclass(frozen=True)
class Elements:
    """A loop over the elements of an access."""

    reads: tuple[Read, ...]
    lines: tuple[Statement, ...]

    @property
    def single(self) -> bool:
        """True if the loop has one statement."""
        return len(self.lines) == 1


@dataclass(frozen=True)
class RowSum:
    """A sum over a row, which begins with the partial sum of a thread."""

    name: str
    value: str
    total: str
    of_mean: bool = False
    """True for the sum of the mean."""


@dataclass(frozen=True)
class Statistics:
    """The computation of the statistics of a row."""

    sums: tuple[RowSum, ...]
    moments: bool
    """True if each part of a row has its own mean."""


RMS = Statistics((RowSum("sums", "h[i] * h[i]", "squares"),), moments=False)
LAYER = Statistics(
    (
        RowSum("sums", "h[i]", "sum", of_mean=True),
        RowSum("deviations", "(h[i] - mean) * (h[i] - mean)", "squares"),
    ),
    moments=True,
)


@dataclass(frozen=True)
class Kernel:
    """The parts of a kernel that its macros print."""

    streams: tuple[Slots, ...]
    """The tensors that pass through the ring."""
    stored: tuple[Slots, ...]
    columns: tuple[Column, ...]
    rows: tuple[RowValue, ...]
    heads: bool
    """True if a row needs its head."""
    h: Elements
    statistics: Statistics
    to_come: str
    """The number of stages that the loop fetches."""
    fetches: tuple[str, ...]
    """The conditions for which a round begins with a fetch."""
    held_if: str
    """The condition for which columns are in registers."""
    unroll: str
    clusters: bool
    any_width: bool
    """True if a shape is for any number of elements."""
    from_memory: bool = False
    """True if a kernel without a ring loads a whole row at once."""
    keeps: tuple[str, ...] = ()
    """The template argument KEEP of slots, for the L2 policy of rows."""
    early_moments: bool = False
    """True if `moments` is declared for the whole kernel."""

    @property
    def rank(self) -> str:
        """The number of a block in its cluster."""
        return "CLUSTER > 1 ? cluster_rank() : 0" if self.clusters else "0"

    @property
    def stage(self) -> str:
        return self.streams[-1].end


@dataclass(frozen=True)
class Launch:
    """The launch of a kernel in C."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    """Rows of the table of shapes."""
    pointers: tuple[str, ...]
    """The pointers that must be aligned."""
    strides: tuple[str, ...]
    multiple: tuple[str, ...]
    """The argument `multiple`, if the rows of a thread are a multiple of it apart."""
    params: str
    """The parameters of the C function."""
    arguments: tuple[str, ...]
    """The arguments of the kernel."""

    @property
    def rows(self) -> tuple[str, ...]:
        """The table in C++."""
        return tuple(f"{{{', '.join(map(str, s))}}}" for s in self.shapes)

    @property
    def named_rows(self) -> tuple[str, ...]:
        """The table in Python."""
        return tuple(f"_Shape({', '.join(map(str, s))})" for s in self.shapes)

    @property
    def sizes(self) -> tuple[str, ...]:
        """The numbers that must be multiples of an access."""
        return (*self.strides, "width_")

    @property
    def table(self) -> str:
        return f"{self.name.upper()}_SHAPES"

    @property
    def widest(self) -> int:
        return max(width for width, *_ in self.shapes)


def shape_row(shape: Shape, vector: int) -> tuple[int, ...]:
    """Return a shape as a row of the tables of a file."""
    s = shape
    own = 1 if s.single else vector
    return (
        s.width,
        s.threads,
        s.rows,
        s.elements,
        s.cluster,
        own,
        s.stages,
        s.blocks,
        s.turns,
        s.shared,
    )
