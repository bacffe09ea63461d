"""The body of a loop over tiles: the mask, reads of buffers, and the scores."""

from __future__ import annotations

from collections.abc import Sequence

from kgen.expr.hoist import Binding
from kgen.expr.mask_form import TRUE
from kgen.expr.softmax_form import QK
from kgen.kernels.attention.lowered.lowering import INFINITY, Lowering
from kgen.kernels.attention.lowered.model import TileBody, side_of
from kgen.kernels.attention.lowered.tile_reads import read_by_rows, read_once
from kgen.kernels.attention.plan.model import TileLoop
from kgen.kernels.attention.plan.tile_reads import asked_ahead
from kgen.targets.code import (
    Code,
    Name,
    Statement,
    as_type,
    assign,
    at_first_use,
    atom,
    row,
    text,
    times,
)
from kgen.targets.triton.printer import Printer

ONLY_MASKED = ("mask", "inner_live")


def body_of(
    lowering: Lowering,
    loop: TileLoop,
    printer: Printer,
    by_rows: bool = False,
    given: Sequence[Binding] = (),
) -> TileBody:
    """Build the body of a loop for one tile.

    With `by_rows`, addresses of reads per pair are computed before the loop. An element that all
    pairs share is read once. `given` are bindings that the caller already computes.
    """
    core = printer.tile(loop.program.results["core"])
    rows, reads, scores = _bound(lowering, loop, printer, by_rows, given)
    made, logits, factor = _logits(lowering, loop, printer, core)
    return TileBody(
        masked=loop.masked,
        mask_lines=_mask(lowering, loop, printer),
        row_lines=rows,
        read_lines=reads,
        score_lines=[*scores, *made],
        logits=logits,
        scaled=factor,
        dead_rows=loop.masked or not lowering.plan.form.finite,
        lse_lines=_log_sum_exp(lowering, loop, printer),
    )


def _bound(
    lowering: Lowering, loop: TileLoop, printer: Printer, by_rows: bool, given: Sequence[Binding]
) -> tuple[list[Statement], list[Statement], list[Statement]]:
    """Return the statements for scores: before the loop, before the products, and after them."""
    bindings = loop.program.in_loop(without=ONLY_MASKED)
    ahead = asked_ahead(bindings) if by_rows else ()
    row_lines, read_lines, score_lines = list[Statement](), list[Statement](), list[Statement]()
    for binding in bindings:
        if binding in given:
            continue
        found = read_by_rows(binding, loop, printer) if by_rows else None
        rows, lines = found or ([], lowering.lines_of([binding], printer))
        row_lines += rows
        if by_rows:
            lines = read_once(binding, loop, printer, lines)
        (read_lines if binding.name in ahead else score_lines).extend(lines)
    return row_lines, read_lines, score_lines


def _logits(
    lowering: Lowering, loop: TileLoop, printer: Printer, core: Code
) -> tuple[list[Statement], str, Code | None]:
    """Return the statements for the logits of a tile, their name, and a factor that is still to be
    applied.
    """
    form, results = lowering.plan.form, loop.program.results
    scale = printer.tile(results["qk_scale"])
    if form.max_of_core:
        return (
            ([], "qk", atom(scale)) if form.core == QK else ([assign("s", core)], "s", atom(scale))
        )
    score: Code = times(core, scale)
    if "bias" in results:
        score = row("add", score, printer.tile(results["bias"]))
    return [assign("s", score)], "s", None


def _mask(lowering: Lowering, loop: TileLoop, printer: Printer) -> list[Statement]:
    """Return the statements for the mask of a tile.

    They are the first in a tile. Values that the scores need too are computed in both places.
    """
    program = loop.program
    lines = lowering.lines_of(program.in_loop(needed_by=ONLY_MASKED), printer)
    if loop.inner_live != TRUE:
        live = assign(
            f"{side_of(loop.inner).name}_live", printer.own(program.results["inner_live"])
        )
        lines = at_first_use(lines, [live])
    if loop.masked:
        lines.append(assign("mask", printer.tile(program.results["mask"])))
    return lines


def _log_sum_exp(lowering: Lowering, loop: TileLoop, printer: Printer) -> list[Statement]:
    """Return the statements that convert the stored log-sum-exp to the log-sum-exp of the loop's
    logits.
    """
    results = loop.program.results
    rest = results.get("row_rest")
    value: Code = Name("lse") if rest is None else row("sub", "lse", printer.own(rest))
    if not lowering.plan.form.finite:
        # If every logit of a row is -inf, so is lse. With lse = inf, P = 2^(-inf - inf) is zero
        # instead of NaN.
        nothing = row("eq", "lse", text('float("-inf")'))
        value = row("where", nothing, INFINITY, value)
    if any(g.along == "pair" for g in loop.gradients) and results["outer_live"] != TRUE:
        # Scores of rows past the end are arbitrary, and no mask hides them. P times zero may be
        # NaN.
        value = row("where", "q_live", value, INFINITY)
    lines: list[Statement] = [] if value == Name("lse") else [assign("lse", value)]
    if lowering.plan.exact:
        high = as_type("lse", "float32")
        low = as_type(row("sub", "lse", high), "float32")
        # The low part of an infinite log-sum-exp must be zero, because inf - inf is NaN.
        lines.append(assign("lse_low", row("where", row("eq", high, "lse"), text("0.0"), low)))
        lines.append(assign("lse", high))
    return lines
