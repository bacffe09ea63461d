"""The plan of attention kernels: loops over tiles, and gradients of buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from kgen.expr.hoist import Place, Program
from kgen.expr.index_ranges import IndexRanges
from kgen.expr.nodes import Const, Node, Type, Var, variables
from kgen.expr.softmax_form import KV_IDX, Q_IDX, Q_START, SoftmaxForm
from kgen.expr.spans import Span
from kgen.expr.tile_ranges import Axis
from kgen.kernels.attention.plan.block_mask import BlockMask, Choice
from kgen.kernels.attention.plan.tiles import Problem, TileTables
from kgen.kernels.attention.spec import AttentionSpec

SIZES = frozenset({"B", "HQ", "HKV", "SQ", "SK"})
SQ, SK = Var("SQ", Type.INT), Var("SK", Type.INT)
Q_AXIS = Axis(Q_IDX, Q_START, Var("q_last", Type.INT), SQ)
KV_AXIS = Axis(KV_IDX, Var("kv_start", Type.INT), Var("kv_last", Type.INT), SK)
OFFS_N = Var("offs_n", Type.INT)
Q_LIVE, KV_LIVE = Var("q_live", Type.BOOL), Var("kv_live", Type.BOOL)
ONE = Const(1, Type.INT)
ALONG_DIAGONAL = Place(False, ("q", "kv"))
"""Place of values that depend on the distance only: computed once for all tiles on a diagonal."""


@dataclass(frozen=True)
class Chunk:
    """A block of columns of a head, `[start, start + size)`."""

    columns: str
    """Name of its column offsets: `offs_d`, or `offs_e` for V and out of another width."""
    tag: str
    """Suffix of the names of its registers."""
    start: int
    """First column."""
    size: int
    """Number of columns, a power of two."""
    width: int
    """Number of columns that exist; the others are padding."""


@dataclass(frozen=True)
class Guards:
    """Conditions on one side, queries or keys."""

    bound: Node
    """True for positions inside the tensor."""
    live: Node
    """True for positions in bounds that the mask keeps on their own account."""


@dataclass(frozen=True)
class ReadGradient:
    """The gradient through one distinct read of a buffer.

    The element at `indices` is the sum of `d score_mod * derivative * factor` over all pairs that
    read it.
    """

    name: str
    """Name of the gradient, unique in the plan."""
    buffer: str
    indices: tuple[Node, ...]
    """Indices of the read. With `along` "distance", they depend on the distance."""
    along: str
    """Granularity of the kernel's sums, one value per: "q" (query), "kv" (key), "distance" or
    "pair".
    """
    summed: tuple[str, ...] | None
    """The dimensions among `b h q_idx kv_idx` that are the indices. The gradient is a sum over the
    others.

    None if the values must be scattered.
    """
    derivative: Node
    """Derivative of `score_mod` by the read, without `factor`."""
    factor: Node
    """Factor that is the same for one (b, h), so that it is applied after the loop."""


@dataclass(frozen=True)
class TileLoop:
    """The computation of one kernel for a tile of `outer`, with a loop over tiles of `inner`.

    The forward loop is FlashAttention-2 (Dao 2023, Algorithm 1), with the online softmax of Milakov
    and Gimelshein (2018). The backward loops are Algorithm 2 in two parts, one for dq and one for
    dk and dv. So the portable kernels add up dq without atomic additions.
    """

    outer: Axis
    """The axis whose tile a program holds."""
    inner: Axis
    """The axis whose tiles the loop visits."""
    program: Program
    """The values of the loop, each with its place."""
    spans: tuple[Span, ...]
    """Positions of `inner` that a tile visits."""
    masked: bool
    """True if some tile needs the mask."""
    inner_live: Node
    """Condition for live positions of `inner`."""
    dscore: Node
    """Factor of `ds` inside the loop, which makes it the gradient of `qk`."""
    dscore_factor: Node
    """Factor of dq or dk after the loop, in addition to the softmax scale."""
    gradients: tuple[ReadGradient, ...] = ()
    """Gradients of buffers that the loop computes."""
    listed: bool = False
    """True if the loop visits the blocks of a block mask instead of the spans."""

    @property
    def rotated(self) -> bool:
        """True if programs begin at different tiles of the inner index.

        If all ranges start at one position, all programs would read the same tile at the same time.
        Ranges that move with the outer tile do not have this problem.
        """
        return not self.listed and all(
            not variables(span.lo) & {self.outer.start.name, self.outer.last.name}
            for span in self.spans
        )


@dataclass(frozen=True)
class AttentionPlan:
    """The decisions for all kernels of one spec. A target only prints them."""

    spec: AttentionSpec
    score_mod: Node | None
    """Canonical form. None if the spec has no `score_mod`."""
    mask_mod: Node | None
    """Canonical form. None if the spec has no `mask_mod`."""
    form: SoftmaxForm
    """The logits: `core * multiplier + bias`, and `row_rest`."""
    qk_chunks: tuple[Chunk, ...]
    """Blocks of the columns of Q and K."""
    v_chunks: tuple[Chunk, ...]
    """Blocks of the columns of V."""
    problem: Problem
    """The properties that select tile shapes."""
    tiles: TileTables
    q: Guards
    kv: Guards
    self_attention: bool
    """True if a buffer requires SQ == SK, which the launcher then checks."""
    forward: TileLoop
    dq: TileLoop | None
    """None without the pass `backward`."""
    dkdv: TileLoop | None
    """None without the pass `backward`."""
    pairs: tuple[TileLoop, ...]
    """Loops for gradients with an element per (query, key)."""
    diagonals: tuple[TileLoop, ...]
    """Loops for gradients with an element per distance."""
    index_ranges: IndexRanges
    """Upper bounds of indices, by which reads are proved to be in bounds."""
    choice: Choice
    """The decision for or against a block mask, and its reasons."""
    block_mask: BlockMask | None
    called: Mapping[str, str]
    """The callers' names of parameters and buffers that were renamed because kernels use the
    name.
    """

    @cached_property
    def gradients(self) -> tuple[ReadGradient, ...]:
        """Gradients of buffers, by loop: dq, dkdv, pairs, diagonals."""
        loops = [
            loop for loop in (self.dq, self.dkdv, *self.pairs, *self.diagonals) if loop is not None
        ]
        return tuple(g for loop in loops for g in loop.gradients)

    @property
    def backward(self) -> bool:
        """True if the spec has the pass `backward`."""
        return self.dq is not None

    @property
    def grouped(self) -> bool:
        """True if query heads and key heads may differ in number."""
        return grouped(self.spec)

    @property
    def exact(self) -> bool:
        """True if all kernels compute the same bits of a score, and store the log-sum-exp in
        float64.
        """
        return exact(self.spec)


def exact(spec: AttentionSpec) -> bool:
    """True if all kernels compute the same bits of a score, and store the log-sum-exp in float64.

    Backward recomputes P = 2^(s - lse). The ulp of a score or of a float32 log-sum-exp grows with
    the score, and its error multiplies P. With 16-bit inputs, the rounding of P is larger.
    """
    return spec.dtype == "fp32"


def grouped(spec: AttentionSpec) -> bool:
    """True if query heads and key heads may differ in number.

    Also true for decoding, which packs the queries of a group into the rows of a tile.
    """
    return spec.gqa != 1 or "decode" in spec.passes or spec.paged_kv is not None


def chunks(head_dim: int, columns: str) -> tuple[Chunk, ...]:
    """Split a head dim into one or two blocks, each a power of two of at least 16 columns.

    Matrix units need at least 16 columns. The first block is the largest power of two. The second
    is the rest, padded to a power of two: 192 = 128 + 64, 576 = 512 + 64.

    There is a single padded block if the padded rest is as large as the first block. The same holds
    if the first block has less than 64 columns: 56 becomes 64.
    """
    size = max(16, 1 << (head_dim.bit_length() - 1))
    if size >= head_dim:
        return (Chunk(columns, "", 0, size, head_dim),)
    rest = head_dim - size
    padded = max(16, 1 << (rest - 1).bit_length())
    if padded == size or size < 64:
        return (Chunk(columns, "", 0, 2 * size, head_dim),)
    return Chunk(f"{columns}_0", "_0", 0, size, size), Chunk(
        f"{columns}_1", "_1", size, padded, rest
    )
