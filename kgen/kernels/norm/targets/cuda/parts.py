"""The parts that the forward and the backward kernel of a norm in CUDA have in common, as templates name them."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.kernels.norm.plan.shapes import Shape
from kgen.targets.code import Code, Statement


@dataclass(frozen=True)
class Slots:
    """A tensor's share of a stage in shared memory."""

    name: str
    element: str
    slots: str
    """The type of its slots."""
    begin: str
    """The constant that says where the share begins."""
    after: str
    """The value of that constant."""

    @property
    def end(self) -> str:
        return f"{self.begin} + {self.slots}::BYTES"


@dataclass(frozen=True)
class Column:
    """A tensor that varies along columns."""

    name: str
    element: str
    address: str
    """The first column, of the head of a block's rows."""
    row_address: str
    """The first column, of the head of a row."""


@dataclass(frozen=True)
class RowValue:
    """A value that a row has as a whole."""

    name: str
    type: str
    value: Code
    zero: str


@dataclass(frozen=True)
class Read:
    """An access of a tensor that some lines use."""

    name: str


@dataclass(frozen=True)
class Elements:
    """A loop over the elements of an access."""

    reads: tuple[Read, ...]
    lines: tuple[Statement, ...]


@dataclass(frozen=True)
class RowSum:
    """A sum over a row, that a thread begins with its part."""

    name: str
    value: str
    total: str
    of_mean: bool = False
    """True for the sum that the mean is made of."""


@dataclass(frozen=True)
class Statistics:
    """How the statistics of a row are computed."""

    sums: tuple[RowSum, ...]
    moments: bool
    """True where parts of a row have means of their own."""


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
    """The tensors that go through the ring."""
    stored: tuple[Slots, ...]
    columns: tuple[Column, ...]
    rows: tuple[RowValue, ...]
    heads: bool
    """True where a row needs its head."""
    h: Elements
    statistics: Statistics
    to_come: str
    """The stages that the loop fetches itself."""
    fetches: tuple[str, ...]
    """The conditions on which a round begins with a fetch."""
    held_if: str
    """The condition on which columns are in registers."""
    unroll: str
    clusters: bool
    any_width: bool
    """True where some shape has any number of elements."""
    from_memory: bool = False
    """True where a kernel without a ring reads rows at once."""
    keeps: tuple[str, ...] = ()
    """An argument of slots: whether L2 keeps rows."""
    early_moments: bool = False
    """True where `moments` belongs to the whole kernel."""

    @property
    def rank(self) -> str:
        """The number of a block in its cluster."""
        return "CLUSTER > 1 ? cluster_rank() : 0" if self.clusters else "0"

    @property
    def stage(self) -> str:
        return self.streams[-1].end


@dataclass(frozen=True)
class Launch:
    """How C launches a kernel."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    """Rows of the table of shapes."""
    pointers: tuple[str, ...]
    """The pointers that have to be aligned."""
    strides: tuple[str, ...]
    multiple: tuple[str, ...]
    """The argument that rows of one thread are multiples of apart, where there is one."""
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
        """The numbers that have to be multiples of an access."""
        return (*self.strides, "width_")

    @property
    def table(self) -> str:
        return f"{self.name.upper()}_SHAPES"

    @property
    def widest(self) -> int:
        return max(width for width, *_ in self.shapes)


def shape_row(shape: Shape, vector: int) -> tuple[int, ...]:
    """A shape as the tables of a file have it."""
    s = shape
    own = 1 if s.single else vector
    return (s.width, s.threads, s.rows, s.elements, s.cluster, own, s.stages, s.blocks, s.turns, s.shared)
