"""Pass: turn minus infinity in a score into a condition of the mask.

    where(m, x, -inf)                 x under m
    where(c, where(m, x, -inf), y)    where(c, x, y) under `m or not c`
    x + where(m, y, -inf)             x + y under m, and `min` in the same way;
                                      for `-` only the left side
    -inf                              no pair is visible

A condition that depends on the score stays in the score, because only the loop knows it. So do
`max` and factors.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.expr.algebra import call
from kgen.expr.mask_form import FALSE, all_of, any_of
from kgen.expr.nodes import Call, Const, Node, Type, Var, rebuild, walk
from kgen.expr.softmax_form import INF, SCORE

MINUS_INFINITY = Call("neg", (INF,), Type.FLOAT)


@dataclass(frozen=True)
class Visible:
    """A score for visible pairs, None if there are none, and the conditions of visibility."""

    value: Node | None
    conditions: tuple[Node, ...] = ()


NOTHING = Visible(None, (FALSE,))


def without_minus_infinity(score: Node) -> tuple[Node, list[Node]]:
    """Return the score of visible pairs, and the conditions under which a pair is visible."""
    found = _visible(score)
    return SCORE if found.value is None else found.value, list(found.conditions)


def _visible(node: Node) -> Visible:
    match node:
        case Call("neg", (Var("inf"),)):
            return NOTHING
        case Call("where", (test, a, b)) if SCORE not in walk(test):
            return _of_choice(node, test, _visible(a), _visible(b))
        case Call("add" | "min", (a, b), Type.FLOAT):
            return _of_both(node, _visible(a), _visible(b))
        case Call("sub", (a, b), Type.FLOAT):
            return _of_both(node, _visible(a), Visible(b))
    return Visible(node)


def _of_choice(node: Call, test: Node, a: Visible, b: Visible) -> Visible:
    if a.value is None and b.value is None:
        return NOTHING
    if b.value is None:
        return Visible(_real(a.value), (test, *a.conditions))
    if a.value is None:
        return Visible(_real(b.value), (call("not", test), *b.conditions))
    if not (a.conditions or b.conditions):
        return Visible(node)
    one = [any_of([call("not", test), all_of(list(a.conditions))])] if a.conditions else []
    other = [any_of([test, all_of(list(b.conditions))])] if b.conditions else []
    value = a.value if a.value == b.value else rebuild(node, (test, a.value, b.value))
    return Visible(value, (*one, *other))


def _of_both(node: Call, a: Visible, b: Visible) -> Visible:
    if a.value is None or b.value is None:
        return NOTHING
    if not (a.conditions or b.conditions):
        return Visible(node)
    conditions = (*a.conditions, *b.conditions)
    if node.fn == "add" and _is_zero(a.value):
        return Visible(_real(b.value), conditions)
    if node.fn in ("add", "sub") and _is_zero(b.value):
        return Visible(_real(a.value), conditions)
    return Visible(rebuild(node, (a.value, b.value)), conditions)


def _is_zero(node: Node) -> bool:
    return isinstance(node, Const) and node.value == 0


def _real(node: Node | None) -> Node:
    """Return the number as a real number, because a branch may be an integer."""
    assert node is not None
    if isinstance(node, Const):
        return Const(float(node.value), Type.FLOAT)
    return node if node.type is Type.FLOAT else call("float", node)
