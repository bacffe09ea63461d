"""What a plan of attention is made of: tiles, loops over them, gradients of buffers."""

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
"""Where what depends on a distance is computed: once for all tiles on a diagonal."""


@dataclass(frozen=True)
class Chunk:
    """A power-of-two block of columns of a head: `[start, start + size)`, of which the first `width` exist.

    `columns` names its column offsets: `offs_d`, and `offs_e` of v and out if their width differs. `tag` tells its
    registers from other blocks'.
    """

    columns: str
    tag: str
    start: int
    size: int
    width: int


@dataclass(frozen=True)
class Guards:
    """Conditions on one side alone. `bound` keeps inside the tensor, `live` also inside what the mask allows there."""

    bound: Node
    live: Node


@dataclass(frozen=True)
class ReadGradient:
    """The gradient through one distinct read of a buffer: `sum of dscore_mod * derivative` at `indices`.

    `along` says over which positions it is kept before it is written: "q" (a value per query), "kv" (a value per key),
    "distance" (a value per q_idx - kv_idx, over which `indices` then are), or "pair". `summed` names the dimensions
    `b h q_idx kv_idx` that the indices are, one for one, so that the gradient is a plain sum over the others; it is
    `None` when the values have to be scattered.
    """

    name: str
    buffer: str
    indices: tuple[Node, ...]
    along: str
    summed: tuple[str, ...] | None
    derivative: Node
    factor: Node


@dataclass(frozen=True)
class TileLoop:
    """What one kernel computes for a tile of `outer`, looping over tiles of `inner`."""

    outer: Axis
    inner: Axis
    program: Program
    spans: tuple[Span, ...]
    masked: bool
    inner_live: Node
    dscore: Node
    """What the gradient of the modified score is multiplied by inside the loop to give that of `qk`."""
    dscore_factor: Node
    """What dq or dk is multiplied by after the loop, besides the softmax scale."""
    gradients: tuple[ReadGradient, ...] = ()
    listed: bool = False
    """It visits the blocks that the block mask lists, and not the spans."""

    @property
    def rotated(self) -> bool:
        """Whether programs begin at different tiles of the inner index.

        Where every program's range starts at the same position, all of them would read the same tile at the
        same time; a range
        that moves with the outer tile spreads the reads by itself.
        """
        return not self.listed and all(
            not variables(span.lo) & {self.outer.start.name, self.outer.last.name} for span in self.spans
        )


@dataclass(frozen=True)
class AttentionPlan:
    """Everything a target needs to spell the kernels of one spec."""

    spec: AttentionSpec
    score_mod: Node | None
    mask_mod: Node | None
    form: SoftmaxForm
    qk_chunks: tuple[Chunk, ...]
    v_chunks: tuple[Chunk, ...]
    problem: Problem
    tiles: TileTables
    q: Guards
    kv: Guards
    self_attention: bool
    """A buffer ties the two lengths: the launcher requires SQ == SK."""
    forward: TileLoop
    dq: TileLoop | None
    dkdv: TileLoop | None
    pairs: tuple[TileLoop, ...]
    diagonals: tuple[TileLoop, ...]
    index_ranges: IndexRanges
    choice: Choice
    """Why there is a block mask, or none."""
    block_mask: BlockMask | None
    called: Mapping[str, str]
    """What callers say for a name of the spec that gave way to one of the kernels."""

    @cached_property
    def gradients(self) -> tuple[ReadGradient, ...]:
        """Gradients of buffers, in the order in which `score_mod` reads them."""
        loops = [loop for loop in (self.dq, self.dkdv, *self.pairs, *self.diagonals) if loop is not None]
        return tuple(g for loop in loops for g in loop.gradients)

    @property
    def backward(self) -> bool:
        """Whether the spec asks for gradients."""
        return self.dq is not None

    @property
    def grouped(self) -> bool:
        """Whether heads of queries and of keys are told apart."""
        return grouped(self.spec)

    @property
    def exact(self) -> bool:
        """True if kernels agree on every score to the last bit, and keep the log-sum-exp in float64."""
        return exact(self.spec)


def exact(spec: AttentionSpec) -> bool:
    """True if kernels agree on every score to the last bit, and keep the log-sum-exp in float64.

    Backward computes P = 2^(s - lse) anew. A score that is off by one unit in its last place, or a log-sum-exp that is
    rounded to float32, spoils P by a factor that grows with the score. In 16 bits P is rounded more coarsely anyway.
    """
    return spec.dtype == "fp32"


def grouped(spec: AttentionSpec) -> bool:
    """Whether heads of queries and of keys are told apart. Decoding packs the queries of a group into the rows of a
    tile, also where a group is one head."""
    return spec.gqa != 1 or "decode" in spec.passes or spec.paged_kv is not None


def chunks(head_dim: int, columns: str) -> tuple[Chunk, ...]:
    """A head dim as a power of two and, if that leaves a rest, a second one for the rest: 192 = 128 + 64,
    576 = 512 + 64.

    Matrix units want at least 16 columns; a rest that is not a power of two is padded to one, and if that makes
    it as large as the first, or if the first has less than 64 columns, the two are one block: 56 is 64 columns of
    which 56 exist.
    """
    size = max(16, 1 << (head_dim.bit_length() - 1))
    if size >= head_dim:
        return (Chunk(columns, "", 0, size, head_dim),)
    rest = head_dim - size
    padded = max(16, 1 << (rest - 1).bit_length())
    if padded == size or size < 64:
        return (Chunk(columns, "", 0, 2 * size, head_dim),)
    return Chunk(f"{columns}_0", "_0", 0, size, size), Chunk(f"{columns}_1", "_1", size, padded, rest)
