"""Pass: replace expressions of numbers by their value.

Functions of numbers are computed once in float64. Conditions on numbers and compile-time parameters
are decided. An expression stays if its value does not fit in fp32 or 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kgen.expr.algebra import call
from kgen.expr.functions import TABLE
from kgen.expr.mask_form import FALSE, TRUE
from kgen.expr.nodes import Call, Const, Node, Type, rebuild, transform
from kgen.expr.parse import FLOAT32_MAX

FLOAT32_MIN = 2.0**-126


def folded(tree: Node, numbers: Mapping[Node, Node]) -> Node:
    """Return a tree without functions of numbers.

    `numbers` has the values of compile-time parameters, which decide conditions; elsewhere
    parameters keep their names.
    """
    known: dict[Node, Const | None] = {}

    def number(node: Node) -> Const | None:
        """Return the number that a tree is after parameters are replaced, else None."""
        if node not in known:
            known[node] = _number(node, number, numbers)
        return known[node]

    def smaller(node: Node) -> Node:
        if not isinstance(node, Call):
            return node
        if node.fn == "where":
            return choice(node, node.args)
        found = number(node) if node.type is Type.BOOL else _called(node, node.args)
        return node if found is None else found

    return transform(tree, smaller)


def decided(fn: str, a: float, b: float) -> Node:
    """Return a comparison of two numbers as a constant."""
    return TRUE if TABLE[fn].value(a, b) else FALSE


def choice(node: Call, args: tuple[Node, ...]) -> Node:
    """Return `where` with other operands, or one operand if the condition is decided."""
    test, a, b = args
    if not isinstance(test, Const):
        return rebuild(node, args)
    chosen = a if test.value else b
    return chosen if chosen.type is node.type else call("float", chosen)


def _number(
    node: Node, number: Callable[[Node], Const | None], numbers: Mapping[Node, Node]
) -> Const | None:
    found = numbers.get(node, node)
    if isinstance(found, Const):
        return found
    if not isinstance(node, Call):
        return None
    if node.fn == "where":
        test = number(node.args[0])
        chosen = None if test is None else number(node.args[1 if test.value else 2])
        return None if chosen is None else Const(chosen.value, node.type)
    args = [number(a) for a in node.args]
    return None if None in args else _called(node, [a for a in args if a is not None])


def _called(node: Call, args: Sequence[Node]) -> Const | None:
    """Return the value of a function of numbers, if kernels can represent it."""
    if not all(isinstance(a, Const) for a in args):
        return None
    try:
        found = TABLE[node.fn].value(*(a.value for a in args if isinstance(a, Const)))
    except (ArithmeticError, ValueError):
        return None
    if node.type is Type.BOOL:
        return Const(bool(found), Type.BOOL)
    if node.type.integral:
        return Const(int(found), node.type) if abs(found) < 2**31 else None
    return (
        Const(float(found), node.type)
        if found == 0 or FLOAT32_MIN <= abs(found) <= FLOAT32_MAX
        else None
    )
