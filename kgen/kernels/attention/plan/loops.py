"""A loop over tiles before hoisting: the values that it needs, and the place of each."""

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
    """A loop over tiles before hoisting: its two axes, and the places of its values."""

    outer: Axis
    """The axis whose tile a program holds."""
    inner: Axis
    """The axis whose tiles the loop visits."""
    places: dict[str, Place]
    """The place of each index and of each value that depends on the loop."""
    row: Place
    """The place of a value per position of `outer`."""
    column: Place
    """The place of a value per position of `inner`."""
    dscore: tuple[Node, Node]
    """The derivative of `score_mod` by the score, as a factor for after the loop and the rest."""
    gradients: tuple[ReadGradient, ...]
    """The gradients of buffers that the loop computes."""
    spans: tuple[Span, ...]
    """The positions of `inner` that a tile of `outer` visits."""
    along_diagonal: Node | None = None
    """The mask as a condition on the distance, if the loop moves along a diagonal."""
    masked_at: Place = TILE
    """The place of the mask."""

    def roots(
        self, form: SoftmaxForm, mask: Node, live: Mapping[str, Node]
    ) -> dict[str, tuple[Node, Place]]:
        """Return the values that the loop needs, by name, each with its place.

        `live` has the condition for live positions of each index.
        """
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
            # Kernels store the log-sum-exp in base 2.
            q_place = self.row if self.outer.index.name == "q_idx" else self.column
            roots["row_rest"] = (call("mul", LOG2E, form.row_rest), q_place)
        if not is_one(self.dscore[1]):
            roots["dscore"] = (self.dscore[1], TILE)
        for gradient in self.gradients:
            roots[f"d_{gradient.name}"] = (gradient.derivative, TILE)
            if gradient.along == "pair" and gradient.summed is None:
                roots |= {
                    f"d_{gradient.name}[{i}]": (node, TILE)
                    for i, node in enumerate(gradient.indices)
                }
        return roots
