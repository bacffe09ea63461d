"""Masks that models of transformers request, and the kernels that compute them.

A request names the functions of `transformers.masking_utils` whose conjunction is the mask, with
their numbers: `causal_mask_function`, `sliding_window_overlay(8)`. The emitted adapter looks up
requests in a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kgen.expr.algebra import call
from kgen.expr.canonical import canonical
from kgen.expr.mask_form import TRUE, all_of, conjuncts
from kgen.expr.nodes import Const, Node, Type, walk
from kgen.expr.softmax_form import INF, KV_IDX, Q_IDX, SCORE
from kgen.kernels.attention.adapt.derived import DISTANCE, Variant

CAUSAL = "causal_mask_function"
BIDIRECTIONAL = "bidirectional_mask_function"
WINDOW = "sliding_window_overlay"
BOTH_SIDES = "sliding_window_bidirectional_overlay"


@dataclass(frozen=True)
class Request:
    """A mask that a model requests. `window` is the number of its overlay, or None."""

    causal: bool
    window: int | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """The functions of transformers that compose the mask, in alphabetical order."""
        base, overlay = (CAUSAL, WINDOW) if self.causal else (BIDIRECTIONAL, BOTH_SIDES)
        return (base,) if self.window is None else (base, f"{overlay}({self.window})")

    @property
    def mask(self) -> Node:
        """The mask as a tree."""
        conditions: list[Node] = [call("ge", Q_IDX, KV_IDX)] if self.causal else []
        if self.window is not None:
            width = Const(self.window, Type.INT)
            conditions.append(
                call("lt", DISTANCE, width)
                if self.causal
                else call("le", call("abs", DISTANCE), width)
            )
        return all_of(conditions)

    @property
    def layers(self) -> tuple[int | None, ...]:
        """The values of `sliding_window` that a layer with this mask passes."""
        if self.window is None:
            return (None,)
        # For a two-sided window, layers pass the number of the config or that number plus one.
        return (None, self.window) if self.causal else (None, self.window, self.window + 1)

    @property
    def words(self) -> str:
        """A description of the keys of a query."""
        if self.window is None:
            return "keys up to each query" if self.causal else "all keys"
        side = f"the last {self.window} keys up to each query"
        return side if self.causal else f"keys at a distance of up to {self.window} from each query"

    @property
    def models(self) -> str:
        """Examples of models with this mask."""
        if self.window is None:
            return "Llama, Qwen3, GPT-NeoX" if self.causal else "BERT, ViT, BART's encoder"
        return "Mistral" if self.causal else "ModernBERT"


def own_request(variant: Variant) -> Request | None:
    """Return the request for the spec's own mask, or None if no model requests it."""
    if INF in walk(variant.with_numbers(variant.trees.get("score_mod", SCORE))):
        return None  # the score excludes pairs, as a mask does
    mask = _conditions(variant.with_numbers(variant.trees.get("mask_mod", TRUE)))
    return next((one for one in _requests(mask) if _conditions(one.mask) == mask), None)


def _requests(mask: frozenset[Node]) -> Iterator[Request]:
    yield from (Request(causal=True), Request(causal=False))
    numbers = {node.value for part in mask for node in walk(part) if isinstance(node, Const)}
    for number in sorted(n + more for n in numbers if type(n) is int for more in (-1, 0, 1)):
        if number > 0:
            yield from (Request(causal=True, window=number), Request(causal=False, window=number))


def _conditions(mask: Node) -> frozenset[Node]:
    """Return the conditions whose conjunction is the mask, in canonical form."""
    return frozenset(conjuncts(canonical({"mask_mod": mask}).get("mask_mod", TRUE)))
