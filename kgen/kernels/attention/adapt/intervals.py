"""The bounds of loops as Python code over positions of the whole sequence, for the plans of
ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kgen.expr.nodes import (
    FIRST_AT_LEAST,
    Call,
    Const,
    Node,
    Read,
    Type,
    Var,
    buffers_of,
    measured,
    substitute,
    variables,
    walk,
)
from kgen.expr.unparse import show
from kgen.kernels.attention.plan.model import AttentionPlan, TileLoop


def _on_host(bound: Node) -> bool:
    """True if a bound needs only first-axis lengths of buffers, because buffers are lists on the
    host.
    """
    return all(length[1] == 0 for name in variables(bound) if (length := measured(name)))


def _by_elements(bound: Node) -> dict[Node, Node]:
    """Replace lengths of buffers in a bound by lengths of lists, because buffers are lists on the
    host.
    """
    found = ((name, measured(name)) for name in variables(bound))
    return {
        Var(n, Type.INT): Var(f"len({of[0]}.values)", Type.INT) for n, of in found if of is not None
    }


class Ranges:
    """The spans of a loop as Python code over positions of the whole sequence."""

    def __init__(self, plan: AttentionPlan, loop: TileLoop) -> None:
        known: dict[Node, Node] = {
            Var(n, p.scalar): Const(p.value, p.scalar)
            for n, p in plan.spec.params.items()
            if p.value is not None
        }
        ends: list[tuple[Node, Node]] = []
        for span in loop.spans:
            ends += [(span.lo, Const(0, Type.INT)), (span.hi, loop.inner.size)]
        nodes = [substitute(end if _on_host(end) else furthest, known) for end, furthest in ends]
        self.calls = frozenset(_calls(nodes))
        """The functions of `planning.py` that the code calls."""
        texts = [show(substitute(node, _by_elements(node))) for node in nodes]
        self.texts = [*zip(texts[::2], texts[1::2], strict=True)]
        tile = {loop.outer.start.name, loop.outer.last.name}
        scalars = {name for node in nodes for name in variables(node) if not measured(name)}
        used = scalars | {name for node in nodes for name in buffers_of(node)}
        self.names = sorted(used - tile)
        self.params = [loop.outer.start.name, loop.outer.last.name, *self.names]


def _calls(nodes: Iterable[Node]) -> Iterator[str]:
    for part in (part for node in nodes for part in walk(node)):
        if isinstance(part, Read) and part.buffer.endswith(FIRST_AT_LEAST):
            yield "first_at_least"
        if isinstance(part, Call) and part.fn == "where":
            yield "where"
