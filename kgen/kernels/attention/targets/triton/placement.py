"""The place of a head's rows: tensors [B, H, S, D], or packed sequences [T, H, D] with offsets into
the tokens.

Kernels and launcher are the same for both but for these names.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.targets.code import Code, as_type, row


@dataclass(frozen=True)
class FirstRows:
    """The place of a sequence's first row in each tensor of rows: `g` is dO, `o` is out or dq."""

    q: str
    k: str
    v: str
    g: str
    o: str
    dk: str
    dv: str


@dataclass(frozen=True)
class BySide:
    """A text for queries, and one for keys."""

    q: str
    kv: str


@dataclass(frozen=True)
class DeltaRows:
    """How the kernel of delta finds rows."""

    first_o: str | None
    """The first row of a batch; None where tokens have none."""
    first_g: str | None
    first_l: str | None
    rows: str
    """The first row of vectors."""
    no_specialize: str
    programs: str


@dataclass(frozen=True)
class Shape:
    """Sizes of out without its columns, and of the log-sum-exp."""

    q: str
    lse: str
    lse_in_python: str
    """The latter as an expression of q."""


@dataclass(frozen=True)
class Like:
    """How gradients are made."""

    q: str
    k: str
    v: str


@dataclass(frozen=True)
class Sizes:
    """The lines that find sizes: those of q, and others."""

    q: str
    others: list[str]


@dataclass(frozen=True)
class Rows:
    """The texts that all packed sequences have in common, or all tensors [B, H, S, D]."""

    first: FirstRows
    rows: Code
    """The first row of vectors of a head of queries."""
    head_rows: BySide
    """The same in the kernel of dk and dv, and those of a head of keys."""
    delta: DeltaRows
    axis_count: int
    """The number of dimensions of q, k and v."""
    shape: Shape
    like: Like
    group: int
    """Heads that programs take at a time."""


@dataclass(frozen=True)
class Placement:
    """The texts by which kernels and the launcher find the rows of a head."""

    packed: bool
    grouped: bool
    """True if query heads and key heads may differ in number."""
    of: Rows
    programs: BySide
    """How many tiles there are."""
    sizes: Sizes
    empty_out: str
    """How out is made from sizes."""
    empty_like_q: str
    """The same from q alone."""

    @property
    def allocators(self) -> list[str]:
        """The names of `_launch.py` in the texts that make out and gradients."""
        return [] if self.packed else ["_empty"]

    @property
    def dividers(self) -> list[str]:
        """The names of `_launch.py` in `programs`."""
        return [] if self.packed else ["_cdiv"]

    @property
    def kv_head(self) -> str:
        """The name of a head of keys in kernels."""
        return "h_kv" if self.grouped else "h"

    @property
    def kv_head_of_query(self) -> str:
        """The head of keys of a head of queries."""
        return "h // GQA" if self.grouped else "h"

    @property
    def kv_heads(self) -> str:
        """How many heads of keys there are."""
        return "HKV" if self.grouped else "HQ"


def placement(packed: bool, grouped: bool, head_v: int, kv_sizes: str) -> Placement:
    """The place of rows. `kv_sizes` are the heads and the length of tensors that are not packed.

    Heads of keys that are not `grouped` are as many as those of queries.
    """
    of_tiles = BySide(
        programs(packed, grouped, "q", "BLOCK_M"), programs(packed, grouped, "kv", "BLOCK_N")
    )
    if packed:
        heads = "TK, HKV, _ = k.shape" if grouped else "TK = k.shape[0]"
        sizes = Sizes("TQ, HQ, _ = q.shape", [heads, "B = len(cu_seqlens_q) - 1"])
        return Placement(
            packed,
            grouped,
            _PACKED,
            of_tiles,
            sizes,
            f"q.new_empty((TQ, HQ, {head_v}))",
            f"q.new_empty((*q.shape[:2], {head_v}))",
        )
    others = [f"HKV, SK = {kv_sizes}"] if grouped else ["SK = k.shape[2]"]
    sizes = Sizes("B, HQ, SQ, _ = q.shape", others)
    return Placement(
        packed,
        grouped,
        _DENSE,
        of_tiles,
        sizes,
        f"_empty((B, HQ, SQ, {head_v}), q)",
        f"_empty((*q.shape[:3], {head_v}), q)",
    )


def programs(packed: bool, grouped: bool, side: str, block: str) -> str:
    """How many tiles of `block` rows there are of all sequences and heads; `side` is `q` or
    `kv`.
    """
    heads, length = "HKV" if grouped and side == "kv" else "HQ", side[0].upper()
    if packed:
        return f"(T{length} // {block} + B + 1) * {heads}"
    return f"_cdiv(S{length}, {block}) * B * {heads}"


_DENSE = Rows(
    first=FirstRows(
        **{x: f"b * stride_{x}b" for x in "qkvgo"}, dk="b * stride_ob", dv="b * stride_wb"
    ),
    rows=row("mul", as_type("b_h", "int64"), "SQ"),
    head_rows=BySide("(b * HQ + h).to(tl.int64) * SQ", "(b * HQ + h).to(tl.int64) * SK"),
    delta=DeltaRows(
        first_o="b * stride_ob",
        first_g="b * stride_gb",
        first_l="b * stride_lb",
        rows="b_h.to(tl.int64) * SQ",
        no_specialize='do_not_specialize=["HQ", "SQ"]',
        programs="_cdiv(SQ, 64) * B * HQ",
    ),
    axis_count=4,
    shape=Shape("B, HQ, SQ", "B, HQ, SQ", "q.shape[:3]"),
    like=Like(*(f"_empty({x}.shape, {x})" for x in "qkv")),
    # Keys and values of four long sequences stay in L2.
    group=4,
)

_PACKED = Rows(
    first=FirstRows(
        **{x: f"q_begin * stride_{x}s" for x in "qgo"},
        **{x: f"kv_begin * stride_{x}s" for x in "kv"},
        dk="kv_begin * stride_os",
        dv="kv_begin * stride_ws",
    ),
    rows=row("add", row("mul", as_type("h", "int64"), "TQ"), "q_begin"),
    head_rows=BySide("tl.cast(h, tl.int64) * TQ + q_begin", "tl.cast(h, tl.int64) * TK + kv_begin"),
    delta=DeltaRows(
        first_o=None,
        first_g=None,
        first_l=None,
        rows="h.to(tl.int64) * TQ",
        no_specialize='do_not_specialize=["B", "TQ"]',
        programs="_cdiv(TQ, 64) * HQ",
    ),
    axis_count=3,
    shape=Shape("TQ, HQ", "HQ, TQ", "(q.shape[1], q.shape[0])"),
    like=Like(*(f"{x}.new_empty({x}.shape)" for x in "qkv")),
    # Short sequences of more heads also fit in L2. Heavy tiles start earlier, so that the last ones
    # are light.
    group=16,
)
