"""Template data of the serving kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.attention.lowered.loads import load_of
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.lowered.model import (
    KernelParams,
    Load,
    LoopKernel,
    Param,
    TileBody,
    declared,
)
from kgen.kernels.attention.lowered.row_max import (
    RowResults,
    largest_followed,
    largest_started,
    row_results_of,
)
from kgen.kernels.attention.schedules.serve.lowering import (
    LISTED,
    ServeKernel,
    items_params,
    merge_params,
    places_of,
    seen,
    serve_kernel,
    serve_params,
    started,
)
from kgen.kernels.attention.schedules.serve.plan import SEGMENT, ServePlan
from kgen.kernels.attention.schedules.serve.scales import (
    V_FACTOR,
    KeyScaled,
    Scaled,
    of_head,
    scale_steps,
)
from kgen.kernels.attention.targets.triton.shared import (
    Head,
    dead_rows,
    head_of,
    not_specialized,
    sink_load,
)
from kgen.targets.code import (
    Code,
    If,
    Name,
    Statement,
    assign,
    maximum,
    minimum,
    op,
    row,
    uses_of,
)
from kgen.targets.template import Template, filled

_PAGES_OF_TILE = ["q_live", "block_table_ptr", "stride_tp", "stride_kp", "stride_vp"]
"""The parameters of the loop's function for pages and hidden keys."""


@dataclass(frozen=True)
class SegmentRange:
    """The keys of a segment of a span, `[lo, hi)`."""

    lo: Code
    hi: Code


@dataclass(frozen=True)
class Items(ServeKernel, KernelParams, Template):
    """The kernel that writes the lists of work items."""

    template: ClassVar[str] = "attention/serve/_items.j2"

    no_specialize: str
    segment: int

    @property
    def names(self) -> list[str]:
        """The problem parameters, as arguments."""
        return [p.name for p in self._own]

    @property
    def own_params(self) -> list[str]:
        """The problem parameters of the functions that the kernel calls."""
        return declared(self._own)

    @property
    def _own(self) -> list[Param]:
        known = {"B", "GQA", *(p.name for p in self.live_problem)}
        return [p for p in self.problem if p.name in known]

    @property
    def work_lines(self) -> list[str | Statement]:
        """The statements that count the tiles of keys of a sequence's last tile of rows."""
        ends = {
            "q_start": "q_start = tl.maximum(tiles - 1, 0) * BLOCK_M // GQA",
            "q_last": "q_last = tl.maximum(SQ - 1, 0)",
        }
        return [
            *(line for name, line in ends.items() if name in self.live_rows),
            f"{', '.join(self.live_results)} = _serve_range({', '.join(self.live_args)})",
            *self.tiles_counted,
        ]


@dataclass(frozen=True)
class Merge(RowResults, Scaled, Head, KernelParams, Template):
    """The kernel that merges the parts of split tiles."""

    template: ClassVar[str] = "attention/serve/_merge.j2"

    no_specialize: str
    width: int
    """Columns of V."""
    stored_v: list[Load]
    start_lines: list[Statement]

    @property
    def scale_lines(self) -> list[Statement]:
        """The statement that loads the scale of values."""
        return [of_head(V_FACTOR, "v")] if self.quantized else []


@dataclass(frozen=True)
class Serve(RowResults, KeyScaled, ServeKernel, TileBody, LoopKernel, Head, KernelParams, Template):
    """The attention kernel for an item, and the kernels before and after it."""

    template: ClassVar[str] = "attention/serve/_attend.j2"
    optional_fields: ClassVar[tuple[str, ...]] = (*RowResults.optional_fields, "top_started")

    no_specialize: str
    width: int
    """Columns of V."""
    on_dead_rows: str
    sink_lines: list[Statement]
    start_lines: list[Statement]
    items: Items
    merge: Merge

    @property
    def tile_and_page_params(self) -> list[list[str]]:
        """The parameters of the loop's function for tiles, and for pages."""
        return [self.tile_params, _PAGES_OF_TILE, *self.scales_of_tile]

    @property
    def tile_and_page_args(self) -> list[list[str]]:
        """The arguments of the loop's function for tiles, and for pages."""
        return [self.tile_args, _PAGES_OF_TILE, *self.scales_of_tile]

    @property
    def queries_of_tile(self) -> list[str]:
        """The statements that compute the first and the last query of a tile."""
        lines = {
            "q_start": "q_start = row_start // GQA",
            "q_last": "q_last = tl.minimum((row_start + BLOCK_M - 1) // GQA, SQ - 1)",
        }
        bounds = [line for span in self.served for line in span.bounds]
        own = uses_of([*self.loop.prologue, self.loop.row_rest, self.loop.sink, *bounds])
        used = own.union(self.live_rows, self.loop.tile_args)
        return [line for name, line in lines.items() if name in used]

    @property
    def masked_lines(self) -> list[Statement]:
        """The statements for the mask. Keys that no row sees may be NaN."""
        return [*self.mask_lines, seen()]

    @property
    def where_masked(self) -> list[Statement]:
        """The statements that apply the mask to the logits, and follow the largest of each row."""
        rows = [] if self.in_batches else self.followed
        largest = [largest_followed(self.logits, self.scaled) for _ in rows]
        return [If(Name("MASKED"), tuple(self.logits_masked)), *largest]

    @property
    def top_started(self) -> list[Statement]:
        """The statement that starts the largest logit of each row, if it may differ from `m_i`."""
        return [largest_started() for _ in self.followed]

    @property
    def cast(self) -> str:
        """The conversion of K and V. Without a quantized cache, it does nothing on a GPU."""
        return f".to(q{self.qk_blocks[0].tag}.dtype)"

    @property
    def own_row_rest(self) -> Code | None:
        """The `row_rest` of rows, unless their parts have it."""
        return None if self.in_batches else self.row_rest

    @property
    def merge_started(self) -> list[Statement]:
        """The statements that start the merging of segments."""
        return [*self.sink_lines, *_merge_start("m_all", "l_all", "BLOCK_M", bool(self.sink_lines))]

    @property
    def in_segment(self) -> list[SegmentRange]:
        """The keys of a segment in each span."""
        first = row("mul", "segment", SEGMENT)
        end = row("add", first, SEGMENT)
        # The maximum with a start of 0 stays: without it, Triton compiles other code for the loop.
        return [
            SegmentRange(maximum(lo, first), minimum(hi, end))
            for lo, hi in (span.ends for span in self.spans)
        ]

    @property
    def hull_lines(self) -> list[str]:
        """The statements that find the first segment of a tile of rows, and the last."""
        lines = ["segment_first, segment_end = 2**30, 0"]
        for span in self.spans:
            end, seen, segment = span.end, f"{span.end} > 0", "0"
            if span.first is not None:
                seen = f"{span.first} < {end}"
                segment = f"{span.first} * BLOCK_N // {SEGMENT}"
            lines += [
                f"segment_first = tl.minimum(segment_first, tl.where({seen}, {segment}, 2**30))",
                f"segment_end = tl.maximum(segment_end, tl.where({seen}, tl.cdiv({end} * BLOCK_N, "
                f"{SEGMENT}), 0))",
            ]
        return [*lines, "segment_first = tl.minimum(segment_first, segment_end)"]


def _merge_start(m: str, total: str, rows: str, sinks: bool) -> list[Statement]:
    """Return the statements that start the merging of parts, with the sink as the first part."""
    zeros = op(f"tl.zeros([{rows}], tl.float32)")
    if sinks:
        return [
            assign(m, row("add", zeros, "sink")),
            assign(total, op(f"tl.full([{rows}], 1.0, tl.float32)")),
        ]
    return [assign(m, op(f'tl.full([{rows}], float("-inf"), tl.float32)')), assign(total, zeros)]


@dataclass(frozen=True)
class ServeKernels:
    """The serving kernels, with the parameters of each for the launcher."""

    template: Serve
    params: KernelParams
    merge_params: KernelParams
    items_params: KernelParams


def serve_kernels(plan: ServePlan, lowering: Lowering, quantized: bool) -> ServeKernels:
    """Return the serving kernels. `lowering` belongs to `plan.attention`."""
    found, attention = serve_kernel(plan, lowering), plan.attention
    params = serve_params(lowering, found, quantized)
    merged, listed = merge_params(lowering, quantized), items_params(lowering, found)
    head, width = head_of(attention, lowering.tf32), attention.spec.head_dim.v
    lists = [f"{name}_{number}" for number in (0, 1) for name in LISTED]
    own = ["TQ", "SK_MAX", "rows", V_FACTOR, "count_at", "items_at", *places_of(lowering)]
    spec = lowering.spec
    rows = row_results_of(spec, apart=plan.in_batches or spec.sinks)
    numbers = {*lowering.open_sizes, *lowering.runtime, "B", "HQ", *own, *lists}

    def sizes(of: KernelParams, *more: str) -> str:
        return not_specialized([*(p.name for p in of.problem if p.name in numbers), *more])

    sink = [assign("sink", sink_load())] if lowering.spec.sinks else []
    items = filled(
        Items,
        found,
        listed,
        no_specialize=sizes(listed),
        segment=SEGMENT,
    )
    live = op("q_live[:, None]")
    merge = filled(
        Merge,
        head,
        merged,
        RowResults(row_results_of(spec, apart=True)),
        quantized=quantized,
        no_specialize=sizes(merged, *(scale_steps(merge=True) if quantized else ())),
        width=width,
        stored_v=[load_of(c, live, live) for c in attention.v_chunks],
        start_lines=[*sink, *_merge_start("m_i", "l_i", "ROWS", bool(sink))],
    )
    template = filled(
        Serve,
        found,
        found.loop.body,
        found.loop,
        params,
        head,
        RowResults(rows),
        quantized=quantized,
        scaled_values=quantized and lowering.spec.dtype == "fp16",
        no_specialize=sizes(params, *(scale_steps() if quantized else ())),
        width=width,
        on_dead_rows=dead_rows(lowering.spec.sinks),
        sink_lines=sink,
        start_lines=started(found, lowering.spec.sinks),
        items=items,
        merge=merge,
    )
    return ServeKernels(template, params, merged, listed)
