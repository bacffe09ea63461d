"""Operands that make no sense whatever the tensors hold: divisors of zero, by a constant or by terms that cancel, and
bits to shift by that 32 bits do not have.

They are refused where they are written. A quotient by zero means nothing, and sympy would make `zoo` of it; a shift
past the bits of an integer is one thing in Python, another on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, Const, Node, Type, Var, transform, walk

SMALLEST = 2.0**-150
"""What is no larger is zero in float32."""


def misfit(row: str, operand: Node, constants: Mapping[str, int | float]) -> tuple[str, str, str] | None:
    """Code, message and hint, where the second operand of a row of the table makes no sense."""
    if row in ("div", "floordiv", "mod") and is_always_zero(operand, constants):
        hint = "divide by something else; a parameter with a value counts as that value"
        return "zero-division", "the divisor is always zero", hint
    if row in ("lshift", "rshift") and _is_never_of_32_bits(operand, constants):
        return (
            "bad-shift",
            "the bits to shift by are not from 0 to 31",
            "integers have 32 bits: shift by 0 to 31",
        )
    return None


def is_always_zero(node: Node, constants: Mapping[str, int | float]) -> bool:
    """Whether the value is zero for all values of its names but `constants`, which have theirs."""
    tree = _constant(node, constants)
    if isinstance(tree, Const):
        return tree.type is not Type.BOOL and abs(tree.value) <= SMALLEST
    return isinstance(tree, Call) and tree.fn in ("add", "sub", "mul", "neg", "div") and _cancels(tree)


def _is_never_of_32_bits(node: Node, constants: Mapping[str, int | float]) -> bool:
    """Whether a number of bits is a constant below 0 or above 31."""
    tree = _constant(node, constants)
    return isinstance(tree, Const) and not 0 <= tree.value < 32


def _constant(node: Node, constants: Mapping[str, int | float]) -> Node:
    return transform(node, lambda n: _folded(n, constants))


def _folded(node: Node, constants: Mapping[str, int | float]) -> Node:
    """A constant where the operands of a node are; a node without a value, as log(-1), stays."""
    if isinstance(node, Var) and (node.name in constants or node.name == "inf"):
        return Const(constants.get(node.name, math.inf), node.type)
    if not isinstance(node, Call) or not all(isinstance(a, Const) for a in node.args):
        return node
    try:
        value = TABLE[node.fn].value(*(a.value for a in node.args if isinstance(a, Const)))
    except (ArithmeticError, ValueError):
        return node
    return Const(float(value) if node.type is Type.FLOAT else value, node.type)


def _cancels(tree: Node) -> bool:
    """Whether sympy finds nothing left of a sum or a product."""
    import sympy as sp

    from kgen.expr.algebra import Algebra

    if any(isinstance(n, Const) and not math.isfinite(n.value) for n in walk(tree)):
        return False
    return bool(sp.expand(Algebra().to_sympy(tree)) == 0)
