"""Pass: what is made of numbers alone is a number.

Functions of numbers are computed once, here in 64 bits, and conditions on numbers and compile-time parameters are
decided: kernels have neither. A number that fp32 or 32 bits do not have stays the expression that it is.
"""

from __future__ import annotations

from collections.abc import Mapping

from kgen.expr.algebra import call
from kgen.expr.functions import TABLE
from kgen.expr.mask_form import FALSE, TRUE
from kgen.expr.nodes import Call, Const, Node, Type, rebuild, substitute, transform
from kgen.expr.parse import FLOAT32_MAX

FLOAT32_MIN = 2.0**-126


def folded(tree: Node, numbers: Mapping[Node, Node]) -> Node:
    """A tree without functions of numbers. `numbers` are those of compile-time parameters, for conditions that these
    decide; elsewhere parameters keep their names."""
    return transform(tree, lambda node: _folded(node, numbers))


def decided(fn: str, a: float, b: float) -> Node:
    """A comparison of two numbers."""
    return TRUE if TABLE[fn].value(a, b) else FALSE


def choice(node: Call, args: tuple[Node, ...]) -> Node:
    """`where` of other operands; one of a condition that is decided is no choice."""
    test, a, b = args
    if not isinstance(test, Const):
        return rebuild(node, args)
    chosen = a if test.value else b
    return chosen if chosen.type is node.type else call("float", chosen)


def _folded(node: Node, numbers: Mapping[Node, Node]) -> Node:
    if not isinstance(node, Call):
        return node
    if node.fn == "where":
        return choice(node, node.args)
    args = (
        tuple(folded(substitute(a, numbers), {}) for a in node.args) if node.type is Type.BOOL else node.args
    )
    if not all(isinstance(a, Const) for a in args):
        return node
    try:
        found = TABLE[node.fn].value(*(a.value for a in args if isinstance(a, Const)))
    except (ArithmeticError, ValueError):
        return node
    if node.type is Type.BOOL:
        return TRUE if found else FALSE
    if node.type.integral:
        return Const(int(found), node.type) if abs(found) < 2**31 else node
    return Const(float(found), node.type) if found == 0 or FLOAT32_MIN <= abs(found) <= FLOAT32_MAX else node
