"""Pass: rewrite values that depend on positions only through `q_idx - kv_idx` as values over
`distance`.

All pairs on a diagonal of the scores have one distance. Examples are a bias from a table by
distance, a causal mask, and a window.
"""

from __future__ import annotations

from kgen.expr.algebra import Algebra, call
from kgen.expr.nodes import Call, Const, Node, Read, Type, Var, substitute, transform, variables
from kgen.expr.softmax_form import KV_IDX, Q_IDX

DISTANCE = Var("distance", Type.INT)
"""`q_idx - kv_idx`, from 1 - SK to SQ - 1."""

_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})


def over_distance(node: Node, algebra: Algebra) -> Node | None:
    """Return the value over `distance`; None if a position remains after
    `kv_idx = q_idx - distance` is substituted.
    """
    moved = transform(substitute(node, {KV_IDX: call("sub", Q_IDX, DISTANCE)}), _to_one_side)
    found = algebra.to_tree(algebra.to_sympy(moved))
    return None if variables(found) & {Q_IDX.name, KV_IDX.name} else found


def reads_over_distance(node: Node, algebra: Algebra) -> Node:
    """Return the value with each read that depends only on the distance rewritten over
    `distance`.
    """
    if isinstance(node, Read) and {Q_IDX.name, KV_IDX.name} <= variables(node):
        return over_distance(node, algebra) or node
    if isinstance(node, Call):
        return Call(node.fn, tuple(reads_over_distance(a, algebra) for a in node.args), node.type)
    return node


def _to_one_side(node: Node) -> Node:
    """Return `a < b` of integers as `a - b < 0`, with common terms cancelled."""
    if (
        isinstance(node, Call)
        and node.fn in _COMPARISONS
        and all(a.type.integral for a in node.args)
    ):
        return call(node.fn, call("sub", *node.args), Const(0, Type.INT))
    return node
