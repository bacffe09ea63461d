"""The decoding kernels of attention in Triton: what each part of a plan is called in `_decode.j2`."""

from __future__ import annotations

import json
from typing import Any

from kgen.expr.algebra import LOG2E, call
from kgen.expr.hoist import hoist
from kgen.expr.mask_form import TRUE
from kgen.expr.nodes import Const, Type
from kgen.expr.spelling import MUL
from kgen.kernels.attention.lowered.kernels import KernelFields
from kgen.kernels.attention.lowered.loads import streamed_columns
from kgen.kernels.attention.lowered.ranges import end_of
from kgen.kernels.attention.plan.decode import MOST_QUERIES, DecodePlan
from kgen.kernels.attention.plan.model import Chunk
from kgen.kernels.attention.targets.triton.placement import strides
from kgen.targets.code import (
    Assign,
    Code,
    Name,
    Statement,
    as_type,
    assign,
    cdiv,
    load,
    maximum,
    minimum,
    op,
    over,
    row,
    uses_of,
)
from kgen.targets.triton.printer import column

ZERO = Const(0, Type.INT)
_SEEN = assign("kv_live", op("{tl}.max({0}.to({tl}.int32), 0) > 0", "mask"), note="some row sees it")


def decode_fields(plan: DecodePlan, kernels: KernelFields) -> dict[str, Any]:
    """The names of the decoding kernels. `kernels` is made of `plan.attention`."""
    attention = plan.attention
    state = ["m_i", "l_i", *(f"acc{c.tag}" for c in attention.v_chunks)]
    loop = kernels.loop(attention.forward, state, descriptors=False)
    spans, lines, used = _live_tiles(plan, kernels)
    rest = _row_rest(plan, kernels)
    seen = [_SEEN] if plan.hidden_by_head else []
    guard = column("kv_live") if seen or attention.kv.live != TRUE else None
    runtime = [n for n in kernels.problem if n in kernels.runtime]
    fixed = ["B", "HQ", "SQ", "SK", *kernels.open_sizes, *runtime, "splits"]
    return loop | {
        "paged": plan.page_size is not None,
        "rows_known": not plan.page_size or plan.page_per_tile,
        "page_size": plan.page_size,
        "page_lines": _page_lines(plan),
        "mask_lines": [*loop["mask_lines"], *seen],
        "k_loads": _loads(plan, "k", attention.qk_chunks, kernels, guard),
        "v_loads": _loads(plan, "v", attention.v_chunks, kernels, guard),
        "balanced": plan.balanced,
        "live_lines": lines,
        "live_results": ", ".join(n for span in spans for n in (span["first"], span["end"])),
        "live_params": ["b", "q_start", "q_last", *used, "BLOCK_N: tl.constexpr"],
        "live_args": ", ".join(["q_start", "q_last", *used]),
        "balance_params": [n for n in used if n != "B"],
        "balance_args": ", ".join(n for n in used if n != "B"),
        "n_tiles": " + ".join(f"{s['end']} - {s['first']}" for s in spans),
        "spans": spans,
        "row_rest": rest,
        "row_rest_of_rows": loop["row_rest"],
        "tile_of_row": plan.balanced or (rest is not None and "q_start" in rest.names),
        "merged": [_merged(c) for c in attention.v_chunks],
        "no_specialize": f"do_not_specialize={json.dumps(fixed)}",
        "alone": plan.alone,
        "most_queries": MOST_QUERIES,
        # Of pages [page, row, head, column].
        "strides": strides("kv", "pshd" if plan.page_size is not None else "bhsd"),
    }


def _live_tiles(
    plan: DecodePlan, kernels: KernelFields
) -> tuple[list[dict[str, str]], list[Statement], list[str]]:
    """The spans of a row tile in whole KV tiles, ascending and apart: names, lines, and what the lines use."""
    loop = plan.attention.forward
    printer = kernels.printer(loop)
    spans: list[dict[str, str]] = []
    lines: list[Statement] = []
    several = len(loop.spans) > 1
    for number, span in enumerate(loop.spans, 1):
        tag = f"_{number}" if several else ""
        first, end, before = f"first{tag}", f"end{tag}", spans[-1]["end"] if spans else "0"
        start: Code = Name(before)
        stop: Code = cdiv("kv_hi", "BLOCK_N")
        if span.lo != ZERO:
            lines.append(assign("kv_lo", printer.position(span.lo)))
            start = over("kv_lo", "BLOCK_N")
            start = maximum(start, before) if spans else start
        lines.append(assign("kv_hi", printer.position(span.hi)))
        if span.lo == ZERO or number == len(loop.spans):
            lines += [assign(first, start), assign(end, maximum(stop, first))]
        else:
            lo, hi = Name("kv_lo"), Name("kv_hi")
            lines.append(Assign((lo.name, hi.name), (start, stop), note="in tiles"))
            lines += [assign(end, end_of(lo, hi, hi, Name(before))), assign(first, minimum(lo, end))]
        tiles = f"{end} - {first}"
        share = ("tl.maximum(begin, 0)", f"tl.minimum(stop, {tiles})") if several else ("begin", "stop")
        spans.append(
            {
                "first": first,
                "end": end,
                "lo": f"({first} + {share[0]}) * BLOCK_N",
                "hi": f"({first} + {share[1]}) * BLOCK_N",
                "rest": f"begin, stop = begin - ({tiles}), stop - ({tiles})" * (number < len(loop.spans)),
            }
        )
    used = uses_of(lines)
    return spans, lines, [n for n in kernels.problem if n in used]


def _row_rest(plan: DecodePlan, kernels: KernelFields) -> Code | None:
    """What the log-sum-exp of a single row gets back."""
    rest = plan.attention.form.row_rest
    if rest is None:
        return None
    alone = kernels.printer(plan.attention.forward, hoist({}, {}))
    return kernels.returned(call("mul", LOG2E, rest), alone)


def _page_lines(plan: DecodePlan) -> list[Statement]:
    """Where a tile of keys begins, or each of its keys where they are in several pages."""
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
    plan: DecodePlan, x: str, chunks: tuple[Chunk, ...], kernels: KernelFields, guard: Code | None
) -> list[dict[str, Any]]:
    """The addresses of a tile of K or V, one block of columns after the other, and what guards them."""
    loads = []
    for chunk in chunks:
        if plan.page_size is None:
            rows = f"{x}_rows{chunk.tag} + kv_start * stride_{x}s"
        elif plan.page_per_tile:
            rows = f"{x}_rows{chunk.tag} + {x}_page"
        else:
            rows = f"{x}_ptr + {x}_page[:, None] + {streamed_columns(chunk)}[None, :] * stride_{x}d"
        loads.append({"tag": chunk.tag, "rows": rows, "guard": guard})
    return loads


def _merged(chunk: Chunk) -> dict[str, Any]:
    exists = None
    if chunk.width < chunk.size:
        exists = row("lt", chunk.columns, chunk.start + chunk.width)
    weighed = op("({0} > 0.0)[:, None]", "weight")
    inside = weighed if exists is None else row("and", weighed, op("({0})[None, :]", exists))
    return {
        "tag": chunk.tag,
        "columns": chunk.columns,
        "size": chunk.size,
        "load_guard": inside,
        "store_guard": exists,
    }
