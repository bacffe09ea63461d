"""The section on operations: the cost of score and mask per pair, as written and as the loop
computes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from kgen.expr.algebra import LOG2E, call
from kgen.expr.hoist import TILE
from kgen.expr.mask_form import TRUE
from kgen.expr.nodes import Node
from kgen.expr.operations import operations as counted
from kgen.expr.softmax_form import SCORE, with_scores
from kgen.kernels.attention.plan.model import AttentionPlan, TileLoop
from kgen.pages.model import Block, Code, Prose, words
from kgen.pages.tables import counts

OF_MASKS = ("mask", "inner_live")
"""Results that tiles without the mask do not need."""


def operations(plan: AttentionPlan, written: Mapping[str, Node]) -> Iterator[Block]:
    """Yield a table with a row for each kind of operation."""
    columns = {"as written": _as_written(written)}
    if plan.forward.masked:
        columns["in a tile with the mask"] = _in_loop(plan, masked=True)
    columns["in a tile without the mask" if plan.forward.masked else "in the loop"] = _in_loop(
        plan, masked=False
    )
    yield counts(columns)
    yield Prose(
        words(
            "The table omits the matrix products, and the maximum, the power and the sum of "
            "softmax.\n"
            "A product and the addition of its result are one instruction."
        )
    )
    if plan.form.max_of_core:
        taken = "is part of the subtraction of the maximum, and not counted in the loop."
        yield Prose(words("The multiplication by ", Code("qk_scale"), f" {taken}"))


def _as_written(written: Mapping[str, Node]) -> Counter[str]:
    """Count the operations as written, with the factors scale and log2(e)."""
    roots = [call("mul", LOG2E, with_scores(written.get("score_mod", SCORE)))]
    mask = written.get("mask_mod", TRUE)
    found = counted([*roots, mask])
    return found + Counter({"choose": int(mask != TRUE)})


def _in_loop(plan: AttentionPlan, masked: bool) -> Counter[str]:
    loop: TileLoop = plan.forward
    program, results = loop.program, loop.program.results
    bound = program.in_loop(without=() if masked else OF_MASKS)
    score = results["core"]
    if not plan.form.max_of_core:
        score = call("mul", score, results["qk_scale"])
    if "bias" in results:
        score = call("add", score, results["bias"])
    roots = [
        *(b.node for b in bound if b.place == TILE),
        score,
        *([results["mask"]] if masked else []),
    ]
    return counted(roots) + Counter({"choose": int(masked)})
