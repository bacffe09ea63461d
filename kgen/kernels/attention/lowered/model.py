"""The parts of a lowered attention kernel: sides, loads, ranges, bodies and parameters.

Values and statements are trees, which a template prints in its language.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kgen.expr.tile_ranges import Axis
from kgen.targets.code import Assign, Code, If, Name, Statement, assign, atom, op, row, text, times


@dataclass(frozen=True)
class Param:
    """A parameter of a function, and the argument that its callers pass."""

    name: str
    argument: str | None
    """The argument. None if the argument of the previous parameter, such as `*x.stride()`, also
    passes this one.
    """
    annotation: str = ""

    @property
    def declared(self) -> str:
        """The parameter in a signature."""
        return f"{self.name}: {self.annotation}" if self.annotation else self.name


def declared(params: Sequence[Param]) -> list[str]:
    """Return parameters as a signature declares them."""
    return [p.declared for p in params]


def arguments(params: Sequence[Param]) -> list[str]:
    """Return the arguments of a call."""
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
    """Queries or keys, with the names that kernels use for them."""

    name: str
    """Prefix of `_idx`, `_start` and `_last`."""
    block: str
    """Name of the number of rows of a tile."""
    offsets: str
    """Name of the offsets of rows in a tile."""
    length: str
    """Name of the number of positions."""
    words: str
    """The side in comments."""


QUERIES = Side("q", "BLOCK_M", "offs_m", "SQ", "query")
KEYS = Side("kv", "BLOCK_N", "offs_n", "SK", "KV")


def side_of(axis: Axis) -> Side:
    """Return the side of an axis."""
    return QUERIES if axis.index.name == "q_idx" else KEYS


@dataclass(frozen=True)
class Load:
    """A load or store of one block of columns."""

    tag: str
    """Suffix of the register names of the block."""
    columns: Code
    """Column offsets."""
    size: int
    """Number of columns."""
    guard: Code | None = None
    """Guard of the load. None if all elements exist."""
    store_guard: Code | None = None
    """Guard of the store. None if all elements exist."""
    value: Code | None = None
    """Value to store, if the loop omits a factor."""


@dataclass(frozen=True)
class Columns:
    """A block of columns of a head inside a loop."""

    tag: str
    """Suffix of the register names of the block."""
    streamed: Code
    """Column offsets of a load in the loop."""
    size: int
    """Number of columns."""
    onto: list[str]
    """The product to which this block's product is added. Empty for the first block."""


@dataclass(frozen=True)
class Descriptor:
    """A descriptor by which TMA loads blocks of columns of a tensor."""

    name: str
    tensor: str
    rows: str
    """Number of rows of a tile, as a name."""
    columns: int
    """Number of columns."""


@dataclass(frozen=True)
class Held:
    """The tiles that a program holds."""

    by_tma: bool
    """True if TMA may load the tiles."""
    tma: list[Assign]
    """Loads by TMA."""
    own: list[Assign]
    """Loads by pointers."""

    @property
    def statements(self) -> list[Statement]:
        """The statements that load them."""
        return [If(Name("TMA"), tuple(self.tma), tuple(self.own))] if self.by_tma else [*self.own]


@dataclass(frozen=True)
class Stream:
    """Tiles that stream through a loop, in the order in which it loads them."""

    by_tma: str
    """Condition for loads by TMA."""
    guarded: bool
    """True if boundary tiles have rows that must not be loaded."""
    tma: list[Assign]
    """Loads by TMA."""
    masked: list[Assign]
    """Loads by pointers of boundary tiles."""
    whole: list[Assign]
    """Loads by pointers of other tiles."""

    @property
    def statements(self) -> list[Statement]:
        """The statements that load them."""
        loads: tuple[Statement, ...] = tuple(self.whole)
        if self.guarded:
            loads = (If(Name("MASKED"), tuple(self.masked), loads),)
        return [If(text(self.by_tma), tuple(self.tma), loads)]


@dataclass(frozen=True)
class Operands:
    """The tiles of Q, K, V and dO that a kernel loads."""

    streams: tuple[Stream, ...]
    """Tiles of the loop, with one stream per wait."""
    held: Held
    descriptors: tuple[Descriptor, ...]

    @property
    def descs(self) -> list[str]:
        """Names of descriptors, in the kernel and in the launcher."""
        return [d.name for d in self.descriptors]

    @property
    def tensors(self) -> list[str]:
        """Tensors that TMA must be able to load."""
        return list(dict.fromkeys(d.tensor for d in self.descriptors))

    @property
    def blocks(self) -> list[str]:
        """Blocks for which the launcher creates descriptors."""
        return [f"({d.tensor}, {d.rows}, {d.columns})" for d in self.descriptors]


@dataclass(frozen=True)
class Part:
    """A loop over the tiles of `[lo, hi)`, with the mask or without."""

    lo: Code
    hi: Code
    masked: bool
    gap: tuple[Code, Code] | None = None
    """Start and length of a range that the loop skips."""
    options: tuple[Code, ...] = ()
    """Further arguments of the loop's function: the first tile, and the gap."""


@dataclass(frozen=True)
class SpanLoops:
    """The loops over one span or over the lists of a block mask, with the statements for their
    bounds.
    """

    bounds: list[Statement]
    loops: list[Part]


@dataclass(frozen=True)
class Ranges:
    """The tiles that a kernel's loop visits."""

    spans: tuple[SpanLoops, ...]
    searches: list[Statement]
    """Searches of sorted buffers, before all bounds."""
    listed: bool
    """True if the loop visits the lists of a block mask."""
    rotated: bool
    """True if programs begin at different tiles."""
    gapped: bool
    """True if some loop skips a range."""
    range_params: list[str]
    """Parameters of the loop's function for a range."""
    visited: str
    """The visited tiles, in words."""
    turn_words: str | None
    """The sentence of the docstring on `turn`. None if all programs begin at the first tile."""
    gap_words: str | None
    """The sentence of the docstring on `gap_lo` and `gap`. None without a gap."""
    lists: tuple[Param, ...]
    """Parameters for the lists of a block mask."""


@dataclass(frozen=True)
class TileBody:
    """The scores and the mask of one tile."""

    masked: bool
    """True if some tile needs the mask."""
    mask_lines: list[Statement]
    """Statements for the mask."""
    row_lines: list[Statement]
    """Addresses of reads per pair, before the loop."""
    read_lines: list[Statement]
    """Reads before the products."""
    score_lines: list[Statement]
    """Statements for the logits, after the product."""
    logits: str
    """Name of the logits."""
    scaled: Code | None
    """Factor that is still to be applied to the logits. None if they are scaled."""
    dead_rows: bool
    """True if a row may have no finite logit."""
    lse_lines: list[Statement]
    """Statements that convert the stored log-sum-exp to the log-sum-exp of the logits."""

    @property
    def mask_made(self) -> list[Statement]:
        """Statements for the mask in the tiles that have it."""
        return [If(Name("MASKED"), tuple(self.mask_lines))] if self.masked else []

    @property
    def logits_masked(self) -> list[Assign]:
        """The statement that applies the mask to the logits, in any tile."""
        form = '{tl}.where({0}, {1}, float("-inf"))'
        masked = assign(self.logits, op(form, "mask", self.logits, fn="where"))
        return [masked] if self.masked else []

    @property
    def p_masked(self) -> list[Assign]:
        """The statement that applies the mask to P, in any tile."""
        masked = assign("p", op("{tl}.where({0}, {1}, 0.0)", "mask", "p", fn="where"))
        return [masked] if self.masked else []


@dataclass(frozen=True)
class RowGradient:
    """A gradient with a value for each row of a tile."""

    name: str
    """Name of the sums in the loop."""
    value: Code
    """Value to store."""


@dataclass(frozen=True)
class Gradients:
    """The computations after `ds`, the gradient of the modified score, in a tile and after the
    loop.
    """

    gradient_lines: list[Statement]
    """All statements in a tile."""
    products: list[Statement]
    """The products among `gradient_lines`, for a kernel that masks them instead of the scores."""
    masked_late: list[str]
    """Names that this kernel must mask, because they may be NaN."""
    sums: list[Statement]
    """Statements that add products to the gradients of buffers."""
    open_ended: bool
    """True if a product must be masked again."""
    dqk: str
    """Name of the gradient of q @ k^T."""
    factor: Code
    """Factor of dq and dk after the loop."""
    factor_may_be_nan: bool
    """True if the factor may be infinite or NaN for rows without visible pairs."""
    row_gradients: tuple[RowGradient, ...]
    """Gradients that the kernel stores by row."""
    gradient_params: tuple[Param, ...]
    """Parameters for the gradients of buffers that the kernel writes."""
    also: list[str]
    """Gradients of buffers, in words."""

    @property
    def row_sums(self) -> list[str]:
        """Names of the gradients by row."""
        return [g.name for g in self.row_gradients]

    def scaled(self, x: str) -> Code:
        """Return a sum of dq or dk times the factor."""
        return scaled(x, atom(self.factor), self.factor_may_be_nan)


def scaled(x: Code | str, factor: Code, may_be_nan: bool) -> Code:
    """Return a sum times a factor.

    A sum of zero stays zero, even if the factor is infinite or NaN.
    """
    product = times(x, factor)
    return row("where", row("eq", x, text("0.0")), text("0.0"), product) if may_be_nan else product


@dataclass(frozen=True)
class LoopKernel:
    """A kernel that holds a tile of its outer side, and loops over tiles of its inner side."""

    outer: Side
    inner: Side
    operands: Operands
    shared_prologue: list[Statement]
    """Statements before the loop that all query heads share. Empty unless tiles are of keys."""
    prologue: list[Statement]
    """Other statements before the loop."""
    held_by_head: bool
    """True if the held rows depend on the query head."""
    ranges: Ranges
    body: TileBody
    gradients: Gradients | None
    """None for forward."""
    state: list[str]
    """Names of the values that the loop carries."""
    params: tuple[Param, ...]
    """Parameters of the function of the loop, without the values that it carries."""
    stored_qk: list[Load]
    """Loads or stores of tensors as wide as Q."""
    stored_v: list[Load]
    """Loads or stores of tensors as wide as V."""
    store_guard: Code | None
    """Guard for stores of vectors."""
    vector_guard: Code | None
    """Guard for loads of log-sum-exp and delta."""
    row_rest: Code | None
    """Term that `lse` adds after the loop."""
    sink: Code
    """Sink in terms of the loop's logits."""
    last: bool
    """True if the kernel uses the last position of a tile."""

    @property
    def tile_params(self) -> list[str]:
        """The signature of the function of the loop. The values that it carries come first."""
        return [*self.state, *declared(self.params)]

    @property
    def tile_args(self) -> list[str]:
        """Arguments of the call of the function of the loop, in the same order."""
        return [*self.state, *arguments(self.params)]
