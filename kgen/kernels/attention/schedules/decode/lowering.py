"""The decoding kernels, for attention with few queries."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kgen.expr.algebra import LOG2E, call
from kgen.expr.hoist import hoist
from kgen.expr.mask_form import TRUE
from kgen.expr.spelling import MUL
from kgen.kernels.attention.lowered.kernels import loop_kernel
from kgen.kernels.attention.lowered.live_tiles import LiveTiles, live_tiles
from kgen.kernels.attention.lowered.loads import streamed_columns
from kgen.kernels.attention.lowered.lowering import Lowering, row_strides
from kgen.kernels.attention.lowered.model import LoopKernel, Param
from kgen.kernels.attention.plan.model import Chunk
from kgen.kernels.attention.schedules.decode.plan import DecodePlan
from kgen.targets.code import (
    Assign,
    Code,
    Name,
    Statement,
    as_type,
    assign,
    load,
    op,
    over,
    row,
    total,
    uses_of,
)
from kgen.targets.triton.printer import along_row, column

_SEEN = assign(
    "kv_live", op("{tl}.max({0}.to({tl}.int32), 0) > 0", "mask"), note="some row sees it"
)


@dataclass(frozen=True)
class KeyLoad:
    """A block of columns of a tile of K or V. Its rows may be in pages."""

    tag: str
    rows: Code
    """The address of the rows."""
    guard: Code | None


@dataclass(frozen=True)
class Merged:
    """A block of columns of a row's partial results."""

    tag: str
    columns: str
    size: int
    load_guard: Code
    store_guard: Code | None


@dataclass(frozen=True)
class DecodeKernel(LiveTiles):
    """The decoding kernels: one processes a split of the keys, and one merges the splits."""

    loop: LoopKernel
    page_size: int | None
    rows_known: bool
    """True if the rows of a tile are consecutive in memory."""
    page_lines: list[Statement]
    """The statements that find the page of a tile of keys, or of each key."""
    k_loads: list[KeyLoad]
    v_loads: list[KeyLoad]
    k_strides: list[Param]
    v_strides: list[Param]
    balanced: bool
    """True if sequences of different lengths get different numbers of splits."""
    live_names: list[str]
    """The problem parameters that these statements use."""
    live_rows: list[str]
    """The names of the batch and of the tile of rows that these statements use."""
    rest_of_row: Code | None
    """The `row_rest` of a single row, which `lse` adds."""
    merged: list[Merged]

    @property
    def paged(self) -> bool:
        """True if keys are in pages."""
        return self.page_size is not None

    @property
    def queries_of_tile(self) -> list[str]:
        """The statements that compute the first and the last query of a tile, if the kernel uses
        them.
        """
        own = uses_of([*self.loop.prologue, self.loop.row_rest])
        return _ends_of_tile(own.union(self.live_rows, self.loop.tile_args))

    @property
    def batches(self) -> list[str]:
        """The parameter for the number of sequences, if they get different numbers of splits."""
        return ["BATCHES"] if self.balanced else []

    @property
    def live_params(self) -> list[str]:
        """The parameters of the function that finds the tiles."""
        return [*self.live_rows, *self.live_names, "BLOCK_N: tl.constexpr"]

    @property
    def live_args(self) -> list[str]:
        """The arguments of the function that finds the tiles."""
        return [*self.live_rows, *self.live_names, "BLOCK_N"]

    @property
    def balance_rows(self) -> list[str]:
        """The names of a tile of rows that the balancing of splits needs."""
        return [name for name in self.live_rows if name != "b"]

    @property
    def balance_names(self) -> list[str]:
        """The problem parameters that the balancing of splits needs."""
        return [name for name in self.live_names if name != "B"]

    @property
    def balance_args(self) -> list[str]:
        """The arguments of the function that balances the splits."""
        return [*self.balance_rows, "B", "splits * B", *self.balance_names, "BATCHES", "BLOCK_N"]

    @property
    def row_rest_lines(self) -> list[Statement]:
        """The statement that adds `row_rest` to the log-sum-exp."""
        return [] if self.rest_of_row is None else [Assign(("lse",), (self.rest_of_row,), "+=")]

    @property
    def merge_rows(self) -> frozenset[str]:
        """The names `q_start` and `q_last` of a tile of rows, if the merging of a row uses them."""
        of_rest = uses_of([self.rest_of_row]) & {"q_start"}
        return of_rest.union(self.balance_rows) if self.balanced else of_rest

    @property
    def tile_of_row(self) -> list[str]:
        """The statements that find the tile of a row, if its merging uses the tile."""
        if not self.merge_rows:
            return []
        return [
            "# Find the row tile of this row in _decode_kernel: the splits depend on it.",
            "row_start = (q_idx * GQA + h % GQA) // BLOCK_M * BLOCK_M",
            *_ends_of_tile(self.merge_rows),
        ]

    @property
    def merge_blocks(self) -> list[str]:
        """The tile sizes that the merging of a row uses."""
        used = {"BLOCK_M": self.merge_rows, "BLOCK_N": self.balanced}
        return [name for name, there in used.items() if there]

    @property
    def merge_names(self) -> frozenset[str]:
        """The problem parameters that the merging of a row uses."""
        names = uses_of([self.rest_of_row]) | {"HQ", "SQ"}
        if self.merge_rows:
            names |= {"GQA"}
        return names.union(("B", *self.balance_names)) if self.balanced else names


def _ends_of_tile(used: frozenset[str]) -> list[str]:
    """Return the statements for the first and the last query of a tile of rows."""
    lines = {
        "q_start": "q_start = row_start // GQA",
        "q_last": "q_last = tl.minimum((row_start + BLOCK_M - 1) // GQA, SQ - 1)",
    }
    return [line for name, line in lines.items() if name in used]


def decode_kernel(plan: DecodePlan, lowering: Lowering) -> DecodeKernel:
    """Return the decoding kernels of a plan. `lowering` belongs to `plan.attention`."""
    attention = plan.attention
    state = ["m_i", "l_i", *(f"acc{c.tag}" for c in attention.v_chunks)]
    loop = loop_kernel(lowering, attention.forward, state, descriptors=False)
    seen = plan.hidden_by_head
    if seen:
        loop = replace(loop, body=replace(loop.body, mask_lines=[*loop.body.mask_lines, _SEEN]))
    guard = column("kv_live") if seen or attention.kv.live != TRUE else None
    live = live_tiles(attention.forward, lowering.printer(attention.forward))
    used = uses_of(live.live_lines)
    # Pages are [page, row, head, column].
    order = "pshd" if plan.page_size is not None else "bhsd"
    return DecodeKernel(
        loop=loop,
        page_size=plan.page_size,
        rows_known=not plan.page_size or plan.page_per_tile,
        page_lines=_page_lines(plan),
        k_loads=_loads(plan, "k", attention.qk_chunks, guard),
        v_loads=_loads(plan, "v", attention.v_chunks, guard),
        k_strides=row_strides("k", order, "k"),
        v_strides=row_strides("v", order, "v"),
        balanced=plan.balanced,
        spans=live.spans,
        live_lines=live.live_lines,
        live_names=[n for n in lowering.problem if n in used],
        live_rows=[n for n in ("b", "q_start", "q_last") if n in used],
        rest_of_row=_row_rest(plan, lowering),
        merged=[_merged(c) for c in attention.v_chunks],
    )


def _row_rest(plan: DecodePlan, lowering: Lowering) -> Code | None:
    """Return `row_rest` of a single row, which `lse` adds."""
    rest = plan.attention.form.row_rest
    if rest is None:
        return None
    alone = lowering.printer(plan.attention.forward, hoist({}, {}))
    return lowering.returned(call("mul", LOG2E, rest), alone)


def _page_lines(plan: DecodePlan) -> list[Statement]:
    """Return the statements that find the page of a tile of keys, or of each key."""
    if plan.page_size is None:
        return []
    at, size = "kv_start" if plan.page_per_tile else "kv_idx", plan.page_size
    entry = row("add", "block_table_ptr", row("mul", over(at, size), "stride_tp"))
    page = as_type(load(entry, None if plan.page_per_tile else Name("kv_live")), "int64")
    slot = op("{0} % {1}", at, size, binds=MUL, operand=MUL)

    def rows(x: str) -> Code:
        return row("add", row("mul", "page", f"stride_{x}p"), row("mul", slot, f"stride_{x}s"))

    return [assign("page", page), *(assign(f"{x}_page", rows(x)) for x in ("k", "v"))]


def _loads(
    plan: DecodePlan, x: str, chunks: tuple[Chunk, ...], guard: Code | None
) -> list[KeyLoad]:
    """Return the addresses and guards of a tile of K or V, by block of columns."""
    loads = list[KeyLoad]()
    for chunk in chunks:
        if plan.page_size is None:
            rows: Code = row("add", f"{x}_rows{chunk.tag}", row("mul", "kv_start", f"stride_{x}s"))
        elif plan.page_per_tile:
            rows = row("add", f"{x}_rows{chunk.tag}", f"{x}_page")
        else:
            columns = row("mul", along_row(streamed_columns(chunk)), f"stride_{x}d")
            rows = total(Name(f"{x}_ptr"), column(f"{x}_page"), columns)
        loads.append(KeyLoad(chunk.tag, rows, guard))
    return loads


def _merged(chunk: Chunk) -> Merged:
    exists = None
    if chunk.width < chunk.size:
        exists = row("lt", chunk.columns, chunk.start + chunk.width)
    weighed = op("({0} > 0.0)[:, None]", "weight")
    inside = weighed if exists is None else row("and", weighed, op("({0})[None, :]", exists))
    return Merged(chunk.tag, chunk.columns, chunk.size, inside, exists)
