"""The body of a loop over tiles: the mask, what is read, and the scores."""

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
from kgen.targets.code import Code, Name, Statement, as_type, assign, at_first_use, atom, row, text, times
from kgen.targets.triton.printer import Printer

ONLY_MASKED = ("mask", "inner_live")


def body_of(
    lowering: Lowering,
    loop: TileLoop,
    printer: Printer,
    by_rows: bool = False,
    given: Sequence[Binding] = (),
) -> TileBody:
    """One tile of a loop.

    `by_rows`, addresses of what is read for each of its elements are made before the loop, and one element is read
    once. What is `given` is not computed here.
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
    """The lines that scores are made of: ahead of the loop, ahead of the products, and after them."""
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
    """The lines that make the logits of a tile, their name, and what they are still to be multiplied by."""
    form, results = lowering.plan.form, loop.program.results
    scale = printer.tile(results["qk_scale"])
    if form.max_of_core:
        return ([], "qk", atom(scale)) if form.core == QK else ([assign("s", core)], "s", atom(scale))
    score: Code = times(core, scale)
    if "bias" in results:
        score = row("add", score, printer.tile(results["bias"]))
    return [assign("s", score)], "s", None


def _mask(lowering: Lowering, loop: TileLoop, printer: Printer) -> list[Statement]:
    """The mask of a tile. It comes first there: what scores need too is spelled in both places."""
    program = loop.program
    lines = lowering.lines_of(program.in_loop(needed_by=ONLY_MASKED), printer)
    if loop.inner_live != TRUE:
        live = assign(f"{side_of(loop.inner).name}_live", printer.own(program.results["inner_live"]))
        lines = at_first_use(lines, [live])
    if loop.masked:
        lines.append(assign("mask", printer.tile(program.results["mask"])))
    return lines


def _log_sum_exp(lowering: Lowering, loop: TileLoop, printer: Printer) -> list[Statement]:
    """The lines that turn the stored log-sum-exp into the one of the loop's logits."""
    results = loop.program.results
    rest = results.get("row_rest")
    value: Code = Name("lse") if rest is None else row("sub", "lse", printer.own(rest))
    if not lowering.plan.form.finite:
        # Every logit of the row is -inf, and so is lse: -inf - inf makes P zero, where -inf - -inf would be NaN.
        nothing = row("eq", "lse", text('float("-inf")'))
        value = row("where", nothing, INFINITY, value)
    if any(g.along == "pair" for g in loop.gradients) and results["outer_live"] != TRUE:
        # Scores of rows past the end may be anything, and no mask hides them: P times zero may be NaN.
        value = row("where", "q_live", value, INFINITY)
    lines: list[Statement] = [] if value == Name("lse") else [assign("lse", value)]
    if lowering.plan.exact:
        high = as_type("lse", "float32")
        low = as_type(row("sub", "lse", high), "float32")
        # An infinite log-sum-exp has no low part: inf - inf would be NaN.
        lines.append(assign("lse_low", row("where", row("eq", high, "lse"), text("0.0"), low)))
        lines.append(assign("lse", high))
    return lines
