"""The size of a tree during parsing, as kernels would print it with local names inlined."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, Node, Type, children
from kgen.expr.text_checks import MAX_DEPTH, Span, too_deep, wrong

MAX_NODES = 2_000
MAX_EXPANDED = 512


class Built(NamedTuple):
    """A tree with its printed size and depth.

    Local names are inlined, and some functions print an operand twice, so the printed tree may be
    far larger.
    """

    node: Node
    size: int
    depth: int
    terms: int = 1
    """Upper bound of the number of terms after multiplying out."""
    factors: int = 1
    """Number of factors in the longest of these terms."""

    @property
    def type(self) -> Type:
        return self.node.type


def grown(tree: Node, parts: Sequence[Built], times: Sequence[int]) -> Built:
    size = sum(n * p.size for p, n in zip(parts, times, strict=True))
    return Built(tree, 1 + size, 1 + max((p.depth for p in parts), default=0))


def of_tree(tree: Node) -> Built:
    """Measure a tree that was not parsed."""
    times = times_printed(tree.fn) if isinstance(tree, Call) else (1,) * len(children(tree))
    return grown(tree, [of_tree(part) for part in children(tree)], times)


@cache
def times_printed(row: str) -> tuple[int, ...]:
    """Return how often targets print each operand of a row, at most: `abs` is `max(x, -x)`."""
    forms = [spelling.form for spelling in TABLE[row].spelled.values()]
    return tuple(
        max(form.count(f"{{{i}}}") for form in forms) for i in range(max(TABLE[row].arity[0], 1))
    )


def check_expansion(terms: int, factors: int, span: Span) -> None:
    """Raise if sympy would have to multiply out too much.

    Differentiation makes a term of each factor.
    """
    if factors > MAX_DEPTH:
        message = f"the expression multiplies more than {MAX_DEPTH} factors"
        raise wrong(
            span, "too-large", message, "use `exp2(y * log2(x))` for high powers of a positive x"
        )
    if terms * factors > MAX_EXPANDED:
        message = f"multiplied out, the expression has more than {MAX_EXPANDED} factors"
        hint = "use fewer sums in products, or move numbers into a buffer"
        raise wrong(span, "too-large", message, hint)


def limited(built: Built, span: Span) -> Built:
    if built.size > MAX_NODES:
        message = f"with local names inlined, the expression has more than {MAX_NODES} nodes"
        hint = "nest fewer local names, `abs` and `%`, which repeat their operands"
        raise wrong(span, "too-large", message, hint)
    if built.depth > MAX_DEPTH:
        raise too_deep(span)
    return built
