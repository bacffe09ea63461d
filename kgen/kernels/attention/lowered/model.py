"""The parts of a kernel of attention: the sides of its tiles, what it loads, which tiles it visits, what it computes
of each, and what it is given. Values and statements are trees, which a template prints in its language."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kgen.expr.tile_ranges import Axis
from kgen.targets.code import Assign, Code, Statement, atom, row, text, times


@dataclass(frozen=True)
class Param:
    """A parameter of a function, and what its callers give for it."""

    name: str
    argument: str | None
    """None where the argument before brings this one, too, as `*x.stride()` does."""
    annotation: str = ""

    @property
    def declared(self) -> str:
        """The parameter in a signature."""
        return f"{self.name}: {self.annotation}" if self.annotation else self.name


def declared(params: Sequence[Param]) -> list[str]:
    """Parameters in a signature."""
    return [p.declared for p in params]


def arguments(params: Sequence[Param]) -> list[str]:
    """The arguments of a call."""
    return [p.argument for p in params if p.argument is not None]


@dataclass(frozen=True)
class KernelParams:
    """The parameters of a kernel, in the order of its signature and of its launch."""

    tensors: tuple[Param, ...]
    """Pointers and descriptors."""
    strides: tuple[tuple[Param, ...], ...]
    """The strides of each tensor of rows."""
    problem: tuple[Param, ...]
    """Buffers, sizes and numbers."""

    @property
    def tensor_params(self) -> list[str]:
        """The signature of pointers and descriptors."""
        return declared(self.tensors)

    @property
    def stride_params(self) -> list[str]:
        """The signature of strides, a line for each tensor."""
        return [", ".join(declared(of)) for of in self.strides]

    @property
    def problem_params(self) -> list[str]:
        """The signature of the problem."""
        return declared(self.problem)

    @property
    def tensor_args(self) -> list[str]:
        """Pointers and descriptors at a launch."""
        return arguments(self.tensors)

    @property
    def stride_args(self) -> list[str]:
        """Strides at a launch."""
        return [argument for of in self.strides for argument in arguments(of)]

    @property
    def problem_args(self) -> list[str]:
        """The problem at a launch."""
        return arguments(self.problem)


@dataclass(frozen=True)
class Side:
    """Queries or keys: how kernels call what belongs to them."""

    name: str
    """Ahead of `_idx`, `_start` and `_last`."""
    block: str
    """Rows of a tile."""
    offsets: str
    """The rows of a tile, from its first."""
    length: str
    words: str


QUERIES = Side("q", "BLOCK_M", "offs_m", "SQ", "query")
KEYS = Side("kv", "BLOCK_N", "offs_n", "SK", "KV")


def side_of(axis: Axis) -> Side:
    """The side of an index."""
    return QUERIES if axis.index.name == "q_idx" else KEYS


@dataclass(frozen=True)
class Load:
    """One block of columns in a load or store: its place, and what guards it."""

    tag: str
    columns: Code
    size: int
    guard: Code | None = None
    store_guard: Code | None = None
    value: Code | None = None
    """The value to store, where the loop leaves out a factor."""


@dataclass(frozen=True)
class Columns:
    """A block of columns of a head, as a loop has it."""

    tag: str
    """Tells its registers from other blocks'."""
    streamed: Code
    """The columns of a load in the loop."""
    size: int
    onto: list[str]
    """The product that its own is added to; none of the first block."""


@dataclass(frozen=True)
class Descriptor:
    """A descriptor by which TMA loads blocks of columns of a tensor."""

    name: str
    tensor: str
    rows: str
    """How many rows a tile has."""
    columns: int


@dataclass(frozen=True)
class Held:
    """A tile that a program holds."""

    by_tma: bool
    """True where TMA may load it."""
    tma: list[Assign]
    own: list[Assign]
    """The loads by pointers."""


@dataclass(frozen=True)
class Stream:
    """Tiles that stream through a loop, in the order in which it loads them."""

    by_tma: str
    """When TMA loads them."""
    guarded: bool
    """True where tiles with a mask have rows that are not loaded."""
    tma: list[Assign]
    masked: list[Assign]
    whole: list[Assign]


@dataclass(frozen=True)
class Operands:
    """The tiles of q, k, v and dO that a kernel loads."""

    streams: tuple[Stream, ...]
    """The tiles of its loop: one stream for each time that it waits for them."""
    held: tuple[Held, ...]
    descriptors: tuple[Descriptor, ...]

    @property
    def descs(self) -> list[str]:
        """The names of descriptors, in the kernel and in the launcher."""
        return [d.name for d in self.descriptors]

    @property
    def tensors(self) -> list[str]:
        """The tensors that TMA has to be able to load."""
        return list(dict.fromkeys(d.tensor for d in self.descriptors))

    @property
    def blocks(self) -> list[str]:
        """The blocks that the launcher makes descriptors of."""
        return [f'({d.tensor}, tile["{d.rows}"], {d.columns})' for d in self.descriptors]


@dataclass(frozen=True)
class Part:
    """A loop over the tiles of `[lo, hi)`, with the mask or without."""

    lo: Code
    hi: Code
    masked: bool
    gap: tuple[Code, Code] | None = None
    """The start of a range that is left out, and its length."""
    options: tuple[Code, ...] = ()
    """The further arguments of the loop's function: which tile comes first, and the gap."""


@dataclass(frozen=True)
class SpanLoops:
    """The loops over one span of a mask, or over the lists of a block mask, and the lines that make their bounds."""

    bounds: list[Statement]
    loops: list[Part]


@dataclass(frozen=True)
class Ranges:
    """The tiles that a kernel's loop visits."""

    spans: tuple[SpanLoops, ...]
    searches: list[Statement]
    """Searches of sorted buffers ahead of all bounds."""
    listed: bool
    rotated: bool
    """True where programs begin at different tiles."""
    gapped: bool
    """True where a range is left out of some loop."""
    params: list[str]
    """The parameters of the loop's function for a range."""
    visited: str
    """The tiles in words."""
    param_words: list[str]
    """The docstring's lines on `turn`, `gap_lo` and `gap`."""
    lists: tuple[Param, ...] = ()
    """The lists of a block mask."""


@dataclass(frozen=True)
class TileBody:
    """The scores and the mask of one tile."""

    masked: bool
    mask_lines: list[Statement]
    row_lines: list[Statement]
    """Addresses of what is read for each pair, ahead of the loop."""
    read_lines: list[Statement]
    """The reads ahead of the products."""
    score_lines: list[Statement]
    logits: str
    scaled: Code | None
    """The factor of logits; None where they are scaled."""
    dead_rows: bool
    """True where a row may have no finite logit."""
    lse_lines: list[Statement]
    """How the stored log-sum-exp becomes the one of the logits."""


@dataclass(frozen=True)
class RowGradient:
    """A gradient with a value for each row of a tile, and what is stored of it."""

    name: str
    value: Code


@dataclass(frozen=True)
class Gradients:
    """The steps after `ds`, the gradient of the modified score, inside a tile and after the loop."""

    lines: list[Statement]
    products: list[Statement]
    """The products among the lines, for a kernel that masks here what others have masked before."""
    masked_late: list[str]
    """The names that such a kernel masks, for they may be NaN."""
    sums: list[Statement]
    open_ended: bool
    """True where a product is masked once more."""
    dqk: str
    """The gradient of q @ k^T."""
    factor: Code
    """The factor of dq and dk after the loop."""
    factor_may_be_nan: bool
    """True where the factor may be infinite or NaN though no pair is visible."""
    rows: tuple[RowGradient, ...]
    params: tuple[Param, ...]
    """The parameters that the kernel writes gradients of buffers to."""
    also: list[str]
    """The gradients of buffers in words."""

    @property
    def names(self) -> list[str]:
        """The sums by row."""
        return [g.name for g in self.rows]

    def scaled(self, x: str) -> Code:
        """A sum of dq or dk times the factor."""
        return scaled(x, atom(self.factor), self.factor_may_be_nan)


def scaled(x: Code | str, factor: Code, may_be_nan: bool) -> Code:
    """A sum times a factor. Where that may be infinite or NaN though no pair is visible, zero stays zero."""
    product = times(x, factor)
    return row("where", row("eq", x, text("0.0")), text("0.0"), product) if may_be_nan else product


@dataclass(frozen=True)
class LoopKernel:
    """A kernel that holds a tile of its outer side, and loops over tiles of its inner side."""

    outer: Side
    inner: Side
    operands: Operands
    shared_prologue: list[Statement]
    """The lines ahead of the loop for all query heads alike; empty but where tiles are of keys."""
    prologue: list[Statement]
    held_by_head: bool
    """True where it depends on the query head which rows are held."""
    ranges: Ranges
    body: TileBody
    gradients: Gradients | None
    state: list[str]
    """The values that the loop carries."""
    params: tuple[Param, ...]
    """Parameters of the function of the loop."""
    stored_qk: list[Load]
    """The blocks of columns that it loads or stores of tensors as wide as q, with what guards them."""
    stored_v: list[Load]
    store_guard: Code | None
    """Which rows of vectors are stored."""
    vector_guard: Code | None
    """Which rows of log-sum-exp and delta are loaded."""
    row_rest: Code | None
    """The term that the log-sum-exp of a row gets back."""
    sink: Code
    """The sink among the logits of a row."""
    last: bool
    """True where the last position of a tile is asked for."""

    @property
    def tile_params(self) -> list[str]:
        """The signature of the function of the loop."""
        return declared(self.params)

    @property
    def tile_args(self) -> list[str]:
        """The call of the function of the loop."""
        return arguments(self.params)
