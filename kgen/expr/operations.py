"""Counts of the operations of trees, by kind, with each distinct node counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kgen.expr import type_rules
from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, Node, Read, distinct

_KINDS = {
    "add": "add, subtract",
    "sub": "add, subtract",
    "neg": "add, subtract",
    "mul": "multiply",
    "div": "divide",
    "where": "choose",
}
_CONVERSIONS = {"float", "int"}
READ = "read of a buffer"


def operations(nodes: Iterable[Node]) -> Counter[str]:
    """Count operations by kind, without conversions between integers and reals."""
    parts = dict.fromkeys(part for node in nodes for part in distinct(node))
    kinds = (_kind(part) for part in parts)
    return Counter(kind for kind in kinds if kind is not None)


def _kind(node: Node) -> str | None:
    if isinstance(node, Read):
        return READ
    if not isinstance(node, Call) or node.fn in _CONVERSIONS:
        return None
    row = TABLE[node.fn]
    if row.typed is type_rules.comparison:
        return "compare"
    if row.typed is type_rules.logical:
        return "and, or, not"
    if node.fn in _KINDS:
        return _KINDS[node.fn]
    return node.fn if row.callable else row.spelled["python"].form.format("a", "b")
