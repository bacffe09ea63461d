"""The lowered kernels as the kernels for Hopper take them: as mappings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kgen.expr.hoist import Binding
from kgen.kernels.attention.lowered import model
from kgen.kernels.attention.lowered.bodies import body_of
from kgen.kernels.attention.lowered.kernels import accumulators
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.lowered.model import Gradients, LoopKernel, Part
from kgen.kernels.attention.plan.model import TileLoop
from kgen.targets.code import Code, atom
from kgen.targets.triton.printer import Printer

__all__ = ["KernelFields", "accumulators", "fields_of", "scaled"]


class KernelFields(Lowering):
    """A lowering that gives the scores of a tile as a mapping."""

    def tile_fields(self, loop: TileLoop, printer: Printer, given: Sequence[Binding] = ()) -> dict[str, Any]:
        """The scores of one tile, without what is `given`."""
        return {"score_lines": body_of(self, loop, printer, given=given).score_lines}


def scaled(fields: Mapping[str, Any], x: str) -> Code:
    """A sum of dq or dk times what its loop leaves out."""
    return model.scaled(x, fields["dqk_scale"], fields["dqk_may_be_nan"])


def fields_of(kernel: LoopKernel) -> dict[str, Any]:
    """A kernel by the names that the kernels for Hopper know."""
    body, ranges = kernel.body, kernel.ranges
    found: dict[str, Any] = {
        "spans": [{"bounds": s.bounds, "loops": [_part(part) for part in s.loops]} for s in ranges.spans],
        "listed": ranges.listed,
        "searches": ranges.searches,
        "prologue": kernel.prologue,
        "shared_prologue": kernel.shared_prologue,
        "masked": body.masked,
        "mask_lines": body.mask_lines,
        "score_lines": body.score_lines,
        "logits": body.logits,
        "scaled": body.scaled,
        "dead_rows": body.dead_rows,
        "lse_lines": body.lse_lines,
        "row_rest": kernel.row_rest,
        "sink": kernel.sink,
        "vector_guard": kernel.store_guard,
        "vector_load": kernel.vector_guard,
    }
    return found | (_gradients(kernel.gradients) if kernel.gradients is not None else {})


def _part(part: Part) -> dict[str, Any]:
    gap = {"gap": part.gap} if part.gap is not None else {}
    return {"lo": part.lo, "hi": part.hi, "masked": part.masked} | gap


def _gradients(of: Gradients) -> dict[str, Any]:
    return {
        "gradient_lines": of.lines,
        "products": of.products,
        "masked_late": of.masked_late,
        "sums": of.sums,
        "open_ended": of.open_ended,
        "dqk": of.dqk,
        "dqk_product": of.factor,
        "dqk_scale": atom(of.factor),
        "dqk_may_be_nan": of.factor_may_be_nan,
        "accumulators": of.names,
        "row_gradients": [{"name": g.name, "value": g.value} for g in of.rows],
    }
