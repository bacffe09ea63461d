"""The address of a head's rows: tensors [B, H, S, D], or packed sequences [T, H, D] with token
offsets. Kernels and launchers differ only in these expressions.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.targets.code import Code, Statement, as_type, assign, over, row
from kgen.targets.template import filled

ROWS_OF_QUERIES = ("q", "o", "do", "dq")
"""The tensors with a row for each query, by their names in kernels."""
ROWS_OF_KEYS = ("k", "v", "dk", "dv")


@dataclass(frozen=True)
class DeltaRows:
    """The row addresses in the delta kernel."""

    first_o: str | None
    """The first row of a batch. None for packed tokens."""
    first_do: str | None
    first_l: str | None
    rows: str
    """The first row of the vectors."""
    no_specialize: str


@dataclass(frozen=True)
class FirstRows:
    """The first row of a sequence in each tensor of rows."""

    first_q: str
    first_k: str
    first_v: str
    first_o: str
    first_do: str
    first_dq: str
    first_dk: str
    first_dv: str


@dataclass(frozen=True)
class Layout(FirstRows):
    """The expressions that all packed specs, or all [B, H, S, D] specs, share."""

    rows: Code
    """The first row of the vectors of a query head."""
    rows_of_head: str
    """The first row of the vectors of a query head, in the kernel of dk and dv."""
    rows_of_kv_head: str
    """The first row of the vectors of a KV head, in the kernel of dk and dv."""
    delta_rows: DeltaRows
    programs_of_delta: str
    """Number of tiles of the delta kernel."""
    axis_count: int
    """The number of dimensions of q, k and v."""
    shape_of_q: str
    """The sizes of q and out without their columns."""
    shape_of_lse: str
    lse_shape_in_python: str
    """The sizes of the log-sum-exp, as an expression of q."""
    head_of_lse: int
    """The dimension of the log-sum-exp for heads."""
    like_q: str
    """The call that allocates a gradient with the shape of q."""
    like_k: str
    like_v: str
    group: int
    """Number of heads that programs process at a time."""


@dataclass(frozen=True)
class Placement(Layout):
    """The expressions by which kernels and the launcher address the rows of a head."""

    packed: bool
    grouped: bool
    """True if the numbers of query heads and KV heads may differ."""
    programs_of_q: str
    """Number of tiles of queries."""
    programs_of_kv: str
    """Number of tiles of keys."""
    sizes_of_q: str
    """The statement that assigns the sizes of q."""
    other_sizes: list[str]
    """The statements that assign all other sizes."""
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
    def all_but_heads(self) -> str:
        """The dimensions of the log-sum-exp except heads."""
        return "1" if self.packed else "(0, 2)"

    @property
    def kv_head(self) -> str:
        """The name of a KV head in kernels."""
        return "h_kv" if self.grouped else "h"

    @property
    def kv_head_of_query(self) -> str:
        """The KV head of a query head."""
        return "h // GQA" if self.grouped else "h"

    @property
    def head_of_keys(self) -> list[Statement]:
        """The statement that finds the KV head of a query head."""
        return [assign("h_kv", over("h", "GQA"))] if self.grouped else []

    @property
    def counted_kv_heads(self) -> list[Statement]:
        """The statement that computes the number of KV heads, unless it is `HQ`."""
        return [assign("HKV", over("HQ", "GQA"))] if self.grouped else []

    @property
    def kv_heads(self) -> str:
        """Number of KV heads."""
        return "HKV" if self.grouped else "HQ"


def placement(packed: bool, grouped: bool, head_v: int, kv_sizes: str) -> Placement:
    """Return the row addresses.

    `kv_sizes` are the KV heads and the length of unpacked tensors. Unless `grouped`, there are as
    many KV heads as query heads.
    """
    layout = _PACKED if packed else _DENSE
    if packed:
        sizes = "TQ, HQ, _ = q.shape"
        heads = "TK, HKV, _ = k.shape" if grouped else "TK = k.shape[0]"
        others = [heads, "B = len(cu_seqlens_q) - 1"]
        empty_out = f"q.new_empty((TQ, HQ, {head_v}))"
        empty_like_q = f"q.new_empty((*q.shape[:2], {head_v}))"
    else:
        sizes = "B, HQ, SQ, _ = q.shape"
        others = [f"HKV, SK = {kv_sizes}"] if grouped else ["SK = k.shape[2]"]
        empty_out = f"_empty((B, HQ, SQ, {head_v}), q)"
        empty_like_q = f"_empty((*q.shape[:3], {head_v}), q)"
    return filled(
        Placement,
        layout,
        packed=packed,
        grouped=grouped,
        programs_of_q=programs(packed, grouped, "q", "BLOCK_M"),
        programs_of_kv=programs(packed, grouped, "kv", "BLOCK_N"),
        sizes_of_q=sizes,
        other_sizes=others,
        empty_out=empty_out,
        empty_like_q=empty_like_q,
    )


def programs(packed: bool, grouped: bool, side: str, block: str) -> str:
    """Return the number of tiles of `block` rows over all heads and sequences. `side` is `q` or
    `kv`.
    """
    heads, length = "HKV" if grouped and side == "kv" else "HQ", side[0].upper()
    if packed:
        return f"(T{length} // {block} + B + 1) * {heads}"
    return f"_cdiv(S{length}, {block}) * B * {heads}"


_DENSE = filled(
    Layout,
    FirstRows(
        **{f"first_{x}": f"b * stride_{x}b" for x in (*ROWS_OF_QUERIES, *ROWS_OF_KEYS)},
    ),
    rows=row("mul", as_type("b_h", "int64"), "SQ"),
    rows_of_head="(b * HQ + h).to(tl.int64) * SQ",
    rows_of_kv_head="(b * HQ + h).to(tl.int64) * SK",
    delta_rows=DeltaRows(
        first_o="b * stride_ob",
        first_do="b * stride_dob",
        first_l="b * stride_lb",
        rows="b_h.to(tl.int64) * SQ",
        no_specialize='do_not_specialize=["HQ", "SQ"]',
    ),
    programs_of_delta="_cdiv(SQ, 64) * B * HQ",
    axis_count=4,
    shape_of_q="B, HQ, SQ",
    shape_of_lse="B, HQ, SQ",
    lse_shape_in_python="q.shape[:3]",
    head_of_lse=1,
    like_q="_empty(q.shape, q)",
    like_k="_empty(k.shape, k)",
    like_v="_empty(v.shape, v)",
    # Keys and values of four long sequences stay in L2.
    group=4,
)

_PACKED = filled(
    Layout,
    FirstRows(
        **{f"first_{x}": f"q_begin * stride_{x}s" for x in ROWS_OF_QUERIES},
        **{f"first_{x}": f"kv_begin * stride_{x}s" for x in ROWS_OF_KEYS},
    ),
    rows=row("add", row("mul", as_type("h", "int64"), "TQ"), "q_begin"),
    rows_of_head="tl.cast(h, tl.int64) * TQ + q_begin",
    rows_of_kv_head="tl.cast(h, tl.int64) * TK + kv_begin",
    delta_rows=DeltaRows(
        first_o=None,
        first_do=None,
        first_l=None,
        rows="h.to(tl.int64) * TQ",
        no_specialize='do_not_specialize=["B", "TQ"]',
    ),
    programs_of_delta="_cdiv(TQ, 64) * HQ",
    axis_count=3,
    shape_of_q="TQ, HQ",
    shape_of_lse="HQ, TQ",
    lse_shape_in_python="(q.shape[1], q.shape[0])",
    head_of_lse=0,
    like_q="q.new_empty(q.shape)",
    like_k="k.new_empty(k.shape)",
    like_v="v.new_empty(v.shape)",
    # Short sequences of more heads also fit in L2. Heavy tiles start earlier, so that the last ones
    # are light.
    group=16,
)
