"""The address of a head's rows: tensors [B, H, S, D], or packed sequences [T, H, D] with token
offsets. Kernels and launchers differ only in these expressions.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.targets.code import Code, as_type, row


@dataclass(frozen=True)
class FirstRows:
    """The first row of a sequence in each tensor of rows: `g` is dO, and `o` is out or dq."""

    q: str
    k: str
    v: str
    g: str
    o: str
    dk: str
    dv: str


@dataclass(frozen=True)
class BySide:
    """One text for queries, and one for keys."""

    q: str
    kv: str


@dataclass(frozen=True)
class DeltaRows:
    """The row addresses in the delta kernel."""

    first_o: str | None
    """The first row of a batch. None for packed tokens."""
    first_g: str | None
    first_l: str | None
    rows: str
    """The first row of the vectors."""
    no_specialize: str
    programs: str


@dataclass(frozen=True)
class Shape:
    """The sizes of out without its columns, and the sizes of the log-sum-exp."""

    q: str
    lse: str
    lse_in_python: str
    """The sizes of the log-sum-exp, as an expression of q."""


@dataclass(frozen=True)
class Like:
    """The calls that allocate gradients."""

    q: str
    k: str
    v: str


@dataclass(frozen=True)
class Sizes:
    """The statements that assign sizes: the sizes of q, and all others."""

    q: str
    others: list[str]


@dataclass(frozen=True)
class Rows:
    """The expressions that all packed specs, or all [B, H, S, D] specs, share."""

    first: FirstRows
    rows: Code
    """The first row of the vectors of a query head."""
    head_rows: BySide
    """The first rows of a query head and of a KV head in the kernel of dk and dv."""
    delta: DeltaRows
    axis_count: int
    """The number of dimensions of q, k and v."""
    shape: Shape
    like: Like
    group: int
    """Number of heads that programs process at a time."""


@dataclass(frozen=True)
class Placement:
    """The expressions by which kernels and the launcher address the rows of a head."""

    packed: bool
    grouped: bool
    """True if the numbers of query heads and KV heads may differ."""
    of: Rows
    programs: BySide
    """Number of tiles of queries, and of keys."""
    sizes: Sizes
    empty_out: str
    """The expression that allocates out from sizes."""
    empty_like_q: str
    """The expression that allocates out from q."""

    @property
    def allocators(self) -> list[str]:
        """The functions of `_launch.py` that allocate out and gradients."""
        return [] if self.packed else ["_empty"]

    @property
    def dividers(self) -> list[str]:
        """The functions of `_launch.py` that `programs` calls."""
        return [] if self.packed else ["_cdiv"]

    @property
    def kv_head(self) -> str:
        """The name of a KV head in kernels."""
        return "h_kv" if self.grouped else "h"

    @property
    def kv_head_of_query(self) -> str:
        """The KV head of a query head."""
        return "h // GQA" if self.grouped else "h"

    @property
    def kv_heads(self) -> str:
        """Number of KV heads."""
        return "HKV" if self.grouped else "HQ"


def placement(packed: bool, grouped: bool, head_v: int, kv_sizes: str) -> Placement:
    """Return the row addresses.

    `kv_sizes` are the KV heads and the length of unpacked tensors. Unless `grouped`, there are as
    many KV heads as query heads.
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
    """Return the number of tiles of `block` rows over all heads and sequences. `side` is `q` or
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
