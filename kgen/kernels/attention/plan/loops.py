"""A loop over tiles ahead of its program: what it needs, and where each of these values is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kgen.expr.algebra import LOG2E, call
from kgen.expr.differentiate import is_one
from kgen.expr.hoist import TILE, Place
from kgen.expr.mask_form import TRUE
from kgen.expr.nodes import Node
from kgen.expr.softmax_form import SoftmaxForm
from kgen.expr.spans import Span
from kgen.expr.tile_ranges import Axis
from kgen.kernels.attention.plan.model import ALONG_DIAGONAL, ReadGradient


@dataclass(frozen=True)
class Loop:
    """A loop over tiles, ahead of its trees: what runs outside and inside, and where each value is needed."""

    outer: Axis
    inner: Axis
    places: dict[str, Place]
    """By index and value, the indices that it depends on."""
    row: Place
    column: Place
    dscore: tuple[Node, Node]
    """A factor, and the rest of the derivative of the score."""
    gradients: tuple[ReadGradient, ...]
    spans: tuple[Span, ...]
    along_diagonal: Node | None = None
    """The mask of a distance, where a loop moves along a diagonal."""
    masked_at: Place = TILE

    def roots(self, form: SoftmaxForm, mask: Node, live: Mapping[str, Node]) -> dict[str, tuple[Node, Place]]:
        """The values that the loop needs by name, each with the place where it is needed. `live` are by index."""
        roots: dict[str, tuple[Node, Place]] = {
            "core": (form.core, TILE),
            "qk_scale": (form.multiplier, TILE),
            "outer_live": (live[self.outer.index.name], self.row),
            "inner_live": (live[self.inner.index.name], self.column),
            "mask": (mask, self.masked_at),
        }
        if self.along_diagonal is not None and self.along_diagonal != TRUE:
            roots["allowed"] = (self.along_diagonal, ALONG_DIAGONAL)
        if form.bias is not None:
            roots["bias"] = (form.bias, TILE)
        if form.row_rest is not None:
            # The kernels keep the log-sum-exp in base 2.
            q_place = self.row if self.outer.index.name == "q_idx" else self.column
            roots["row_rest"] = (call("mul", LOG2E, form.row_rest), q_place)
        if not is_one(self.dscore[1]):
            roots["dscore"] = (self.dscore[1], TILE)
        for gradient in self.gradients:
            roots[f"d_{gradient.name}"] = (gradient.derivative, TILE)
            if gradient.along == "pair" and gradient.summed is None:
                roots |= {f"d_{gradient.name}[{i}]": (node, TILE) for i, node in enumerate(gradient.indices)}
        return roots
