"""The serving kernels as values and statements."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from kgen.expr.nodes import Const, Type
from kgen.expr.spans import Span
from kgen.kernels.attention.lowered.kernels import loop_kernel
from kgen.kernels.attention.lowered.live_tiles import LiveSpan, LiveTiles, live_tiles
from kgen.kernels.attention.lowered.lowering import Lowering, row_strides
from kgen.kernels.attention.lowered.model import KernelParams, LoopKernel, Param
from kgen.kernels.attention.lowered.params import PAGES, SINKS, row_max_of
from kgen.kernels.attention.lowered.ranges import in_tiles
from kgen.kernels.attention.lowered.row_max import RowResults, row_results_of
from kgen.kernels.attention.schedules.serve.plan import ServePlan
from kgen.kernels.attention.schedules.serve.scales import V_FACTOR, scale_params
from kgen.targets.code import (
    Assign,
    Code,
    Name,
    Statement,
    assign,
    cdiv,
    maximum,
    minimum,
    op,
    over,
    row,
    text,
    uses_of,
)
from kgen.targets.triton.printer import Printer, column

LENGTHS = ("SQ", "SK")
"""Names of the lengths of a sequence, which kernels load."""
BLOCK_N = Name("BLOCK_N")


@dataclass(frozen=True)
class ServedSpan:
    """A span of keys: the part of an item, and the tiles among it that need no mask."""

    bounds: list[Statement]
    full: bool
    """True if some tiles may need no mask."""

    @property
    def gap(self) -> list[str]:
        """The start and length of the range that the masked loop skips."""
        return ["kv_full_lo", "kv_full_hi - kv_full_lo"] if self.full else ["0", "0"]


@dataclass(frozen=True)
class ServeKernel(LiveTiles):
    """The serving kernels of a plan."""

    loop: LoopKernel
    served: tuple[ServedSpan, ...]
    live_rows: list[str]
    """The names of the batch and of the tile of rows that these statements use."""
    live_problem: tuple[Param, ...]
    """The problem parameters that these statements use, except the lengths."""
    in_batches: bool

    @property
    def live_args(self) -> list[str]:
        """The arguments of the function that finds the tiles."""
        return [*self.live_rows, *LENGTHS, *(p.name for p in self.live_problem), "BLOCK_N"]

    @property
    def live_params(self) -> list[str]:
        """The parameters of the function that finds the tiles."""
        problem = [p.declared for p in self.live_problem]
        return [*self.live_rows, *LENGTHS, *problem, "BLOCK_N: tl.constexpr"]


def serve_kernel(plan: ServePlan, lowering: Lowering) -> ServeKernel:
    """Return the serving kernels of a plan. `lowering` belongs to `plan.attention`."""
    forward, spec = plan.attention.forward, plan.attention.spec
    # The running maximum of a row with a sink may be the sink, which is not a score.
    followed = row_results_of(spec, apart=spec.sinks and not plan.in_batches)
    state = [
        "m_i",
        "l_i",
        *RowResults(followed).top,
        *(f"acc{c.tag}" for c in plan.attention.v_chunks),
    ]
    printer = lowering.printer(forward)
    live = live_tiles(forward, printer)
    used = uses_of(live.live_lines)
    served = [
        _served(span, own, printer, number == 0, len(live.spans) > 1, plan.in_batches)
        for number, (span, own) in enumerate(zip(forward.spans, live.spans, strict=True))
    ]
    return ServeKernel(
        loop=loop_kernel(lowering, forward, state, descriptors=False),
        spans=live.spans,
        served=tuple(served),
        live_lines=live.live_lines,
        live_rows=[n for n in ("b", "q_start", "q_last") if n in used],
        live_problem=tuple(
            p for p in lowering.problem.values() if p.name in used and p.name not in LENGTHS
        ),
        in_batches=plan.in_batches,
    )


def _served(
    span: Span, live: LiveSpan, printer: Printer, first: bool, several: bool, in_batches: bool
) -> ServedSpan:
    """Return the bounds of an item's part of a span, and of its tiles without a mask."""
    lo, hi, full_lo, full_hi = (Name(f"kv_{x}") for x in ("lo", "hi", "full_lo", "full_hi"))
    lines: list[Statement] = [Assign((lo.name, hi.name), (live.lo, live.hi))]
    if not span.has_full or in_batches:
        return ServedSpan([*lines, *live.rest], full=False)
    start: Code = lo
    if span.full_lo != Const(0, Type.INT):
        aligned = in_tiles(cdiv(printer.position(span.full_lo), BLOCK_N), BLOCK_N)
        start = minimum(maximum(aligned, lo), maximum(lo, hi))
    lines.append(assign(full_lo.name, start))
    end = in_tiles(over(maximum(printer.position(span.full_hi), 0), BLOCK_N), BLOCK_N)
    lines.append(assign(full_hi.name, maximum(minimum(end, hi), full_lo)))
    return ServedSpan([*lines, *live.rest], full=True)


def serve_params(lowering: Lowering, kernel: ServeKernel, quantized: bool) -> KernelParams:
    """Return the parameters of the attention kernel, except sizes of the list of items."""
    tensors = [
        *(Param("q_ptr", "q"), Param("k_ptr", "k_pages"), Param("v_ptr", "v_pages")),
        *(Param("o_ptr", "out"), Param("lse_ptr", "lse"), *row_max_of(lowering)),
        Param("part_ptr", "parts"),
        *(SINKS if lowering.spec.sinks else ()),
        *(scale_params() if quantized else ()),
        *(Param("work_ptr", "work"), *SEQUENCES, *PAGES),
    ]
    strides = (
        tuple(row_strides("q", "shd", "q")),
        tuple(row_strides("k", "pshd", "k_pages")),
        tuple(row_strides("v", "pshd", "v_pages")),
        *_stored(lowering),
    )
    names = [name for name in lowering.problem if name not in LENGTHS]
    factor = (V_FACTOR,) if quantized else ()
    places = ("TQ", "SK_MAX", *factor, "count_at", "items_at", *places_of(lowering))
    return KernelParams(tuple(tensors), strides, _problem(lowering, names, places))


def merge_params(lowering: Lowering, quantized: bool) -> KernelParams:
    """Return the parameters of the kernel that merges parts."""
    tensors = [
        *(Param("o_ptr", "out"), Param("lse_ptr", "lse"), *row_max_of(lowering)),
        Param("part_ptr", "parts"),
        *(SINKS if lowering.spec.sinks else ()),
        *(scale_params(merge=True) if quantized else ()),
        *(Param("work_ptr", "work"), *SEQUENCES),
    ]
    factor = (V_FACTOR,) if quantized else ()
    places = ("TQ", "SK_MAX", *factor, "count_at", *places_of(lowering))
    problem = _problem(lowering, ["B", "HQ", "GQA"], places)
    return KernelParams(tuple(tensors), _stored(lowering), problem)


def items_params(lowering: Lowering, kernel: ServeKernel) -> KernelParams:
    """Return the parameters of the kernel that writes the list of items."""
    names = {p.name for p in kernel.live_problem} | {"B", "GQA"}
    problem = _problem(lowering, names, ("TQ", "SK_MAX", "rows"))
    *before, gqa = problem
    lists = [
        Param(f"{name}_{number}", None if at else f"*sizes[{number}]")
        for number in (0, 1)
        for at, name in enumerate(LISTED)
    ]
    return KernelParams((Param("work_ptr", "work"), *SEQUENCES), (), (*before, *lists, gqa))


def _problem(
    lowering: Lowering, names: Collection[str], places: Sequence[str]
) -> tuple[Param, ...]:
    """Return the problem parameters of these names, and places in the workspace before GQA."""
    found = [p for p in lowering.problem.values() if p.name in names]
    *before, gqa = found
    return (*before, *(Param(name, _PASSED.get(name, name)) for name in places), gqa)


def places_of(lowering: Lowering) -> tuple[str, ...]:
    """Return the places in the workspace that several kernels use."""
    rows = row_results_of(lowering.spec)
    return ("merges_at", "parts_at", "sums_at", *(row.place for row in rows))


_PASSED = {"parts_at": "places[0]", "sums_at": "places[1]", "maxima_at": "places[2]"}
LISTED = ("items", "merges", "records", "max_items", "max_merges", "max_slots", "target")
"""The places and limits of a list."""
SEQUENCES = (Param("seq_lens_ptr", "seq_lens"), Param("cu_seqlens_q_ptr", "cu_seqlens_q"))
"""The lengths of sequences, and the offsets of their queries."""


def _stored(lowering: Lowering) -> tuple[tuple[Param, ...], ...]:
    """Return the strides of the results. A call may have no tensor for a result of rows."""
    of_rows = {"l": "lse", **{row.letter: row.name for row in row_results_of(lowering.spec)}}
    rows = (
        tuple(
            replace(p, argument=f"*{x}_strides" if p.argument else None)
            for p in row_strides(letter, "hs", x)
        )
        for letter, x in of_rows.items()
    )
    return tuple(row_strides("o", "shd", "out")), *rows


def seen() -> Statement:
    """Return the statement for the keys that some query of a tile sees. Others may be NaN."""
    value = op("{tl}.max(({0} & {1}).to({tl}.int32), 0) > 0", "mask", column("q_live"))
    return assign("kv_live", value, note="some query sees it")


def started(kernel: ServeKernel, sinks: bool) -> list[Statement]:
    """Return the statements that start the sums of rows. Only rows in one part have the sink."""
    nothing = text('float("-inf")')
    zeros = op("{tl}.zeros([BLOCK_M], {tl}.float32)")
    if not sinks or kernel.in_batches:
        m = op('{tl}.full([BLOCK_M], float("-inf"), {tl}.float32)')
        return [assign("m_i", m), assign("l_i", zeros)]
    whole = row("eq", "splits", 1)
    return [
        assign("m_i", row("add", zeros, row("where", whole, kernel.loop.sink, nothing))),
        assign("l_i", row("add", zeros, row("where", whole, text("1.0"), text("0.0")))),
    ]
