"""Parts that kernels of several schedules share: columns of a head, and phrases for comments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from kgen.kernels.attention.lowered.loads import block_of, columns_of
from kgen.kernels.attention.lowered.model import Columns
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.targets.code import Assign, Code, Statement, as_type, load, row, text


@dataclass(frozen=True)
class Head:
    """The columns of a head, and the precision of their products."""

    qk_blocks: list[Columns]
    v_blocks: list[Columns]
    column_lines: list[Assign]
    """The statements for the column offsets of all blocks."""
    v_column_lines: list[Assign]
    """The statements for the column offsets of V only."""
    dot: str
    precision: list[str]


def head_of(plan: AttentionPlan, tf32: bool) -> Head:
    """Return the columns of a plan's heads."""
    return Head(
        qk_blocks=[block_of(c, "qk") for c in plan.qk_chunks],
        v_blocks=[block_of(c, "dp") for c in plan.v_chunks],
        column_lines=columns_of([*plan.qk_chunks, *plan.v_chunks]),
        v_column_lines=columns_of(plan.v_chunks),
        dot="_tf32_dot" if tf32 else "tl.dot",
        precision=[f'input_precision="{plan.spec.precision}"']
        if plan.spec.dtype == "fp32" and not tf32
        else [],
    )


def narrow_values(plan: AttentionPlan) -> bool:
    """True if V has one full block of 16 or 32 columns per head, and K is wider."""
    (first, *rest), keys = plan.v_chunks, plan.qk_chunks[0]
    return not rest and first.width == first.size < min(64, keys.size)


def aligned(plan: AttentionPlan, *names: str) -> list[Statement]:
    """Return the statement that aligns tensors as wide as V, if V is narrow."""
    if not narrow_values(plan):
        return []
    return [Assign(names, tuple(text(f"_aligned({name})") for name in names))]


def not_specialized(names: Sequence[str]) -> str:
    """Return the `triton.jit` option that disables specialization on some parameters."""
    return f"do_not_specialize={json.dumps([*names])}"


def sink_load() -> Code:
    """Return the load of a head's sink, in base 2."""
    address = row("add", "sinks_ptr", row("mul", "h", "stride_sinks"))
    return row("mul", as_type(load(address), "float32"), "LOG2E")


def dead_rows(sinks: bool) -> str:
    """Return the results of rows without a visible key, for a comment."""
    if sinks:
        return "If the sink is -inf, rows without a visible key get zeros, and lse is -inf."
    return "Rows without a visible key get zeros, and lse is -inf."
