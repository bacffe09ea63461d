"""Pass: normal forms of a mask.

In *negation normal form*, `not` is on leaves only, and `abs(x) <= w` is two comparisons. To derive
a tile range, `==` and `!=` of integers become a conjunction and a disjunction of inequalities.
*Conjuncts* are the conditions that hold together. A conjunct of the key side only
(`kv_idx < lens[b]`) guards loads of K and V. One of the query side only guards loads of Q and dO.
The ends of the tensors are guards of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from kgen.expr.algebra import call
from kgen.expr.nodes import Call, Const, Node, Type, rebuild

NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}
MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}

TRUE = Const(True, Type.BOOL)
FALSE = Const(False, Type.BOOL)


def all_of(conditions: list[Node]) -> Node:
    """Return the conjunction, `TRUE` without conditions."""
    if FALSE in conditions:
        return FALSE
    kept = [c for c in conditions if c != TRUE]
    return reduce(lambda a, b: call("and", a, b), kept) if kept else TRUE


def any_of(conditions: list[Node]) -> Node:
    """Return the disjunction, `FALSE` without conditions."""
    if TRUE in conditions:
        return TRUE
    kept = [c for c in conditions if c != FALSE]
    return reduce(lambda a, b: call("or", a, b), kept) if kept else FALSE


def normalize(mask: Node) -> Node:
    """Push negations to the leaves and split `abs` comparisons; the result is equal for every
    input.

    Comparisons inside values, as in `where`, stay: they give no range, and splitting nested ones
    doubles their number at each level.
    """
    return _positive(mask, _split_abs)


def without_negations(mask: Node) -> Node:
    """Push negations to the leaves, which stay as they are."""
    return _positive(mask, lambda leaf: leaf)


def conjuncts(mask: Node) -> list[Node]:
    """Return the conditions that `mask` requires together."""
    if isinstance(mask, Call) and mask.fn == "and":
        return conjuncts(mask.args[0]) + conjuncts(mask.args[1])
    return [] if mask == TRUE else [mask]


def disjuncts(mask: Node) -> list[Node]:
    """Return the conditions of which `mask` requires one."""
    if isinstance(mask, Call) and mask.fn == "or":
        return disjuncts(mask.args[0]) + disjuncts(mask.args[1])
    return [] if mask == FALSE else [mask]


def _positive(mask: Node, leaf: Callable[[Node], Node]) -> Node:
    if isinstance(mask, Call) and mask.fn == "not":
        return _negative(mask.args[0], leaf)
    if isinstance(mask, Call) and mask.fn in ("and", "or"):
        return rebuild(mask, tuple(_positive(a, leaf) for a in mask.args))
    return leaf(mask)


def _negative(mask: Node, leaf: Callable[[Node], Node]) -> Node:
    if isinstance(mask, Const):
        return Const(not mask.value, Type.BOOL)
    if isinstance(mask, Call):
        if mask.fn == "not":
            return _positive(mask.args[0], leaf)
        if mask.fn in ("and", "or"):
            other = {"and": "or", "or": "and"}[mask.fn]
            return call(other, *(_negative(a, leaf) for a in mask.args))
        # For floats only == and != have an opposite: with NaN, neither `a < b` nor `a >= b` holds.
        exact = all(a.type.integral for a in mask.args) or mask.fn in ("eq", "ne")
        if mask.fn in NEGATED and exact:
            return leaf(Call(NEGATED[mask.fn], mask.args, Type.BOOL))
    return call("not", mask)


def _split_abs(node: Node) -> Node:
    """Split a comparison of an integer `abs`: `abs(x) <= w` is `x <= w and x >= -w`."""
    if not (isinstance(node, Call) and node.fn in MIRRORED):
        return node
    fn, (left, right) = node.fn, node.args
    if _is_abs(right) and not _is_abs(left):
        fn, left, right = MIRRORED[fn], right, left
    if not (isinstance(left, Call) and _is_abs(left)):
        return node
    (x,) = left.args
    minus = call("neg", right) if not isinstance(right, Const) else Const(-right.value, right.type)
    match fn:
        case "lt" | "le":
            return call("and", call(fn, x, right), call(MIRRORED[fn], x, minus))
        case "gt" | "ge":
            return call("or", call(fn, x, right), call(MIRRORED[fn], x, minus))
    return node


def _is_abs(node: Node) -> bool:
    return isinstance(node, Call) and node.fn == "abs" and node.type.integral
