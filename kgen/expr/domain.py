"""Checks of operands that are invalid for all tensors: divisors that are zero, and shifts outside 0
to 31.

The parser refuses them. A quotient by zero is undefined, and sympy would make `zoo` of it. A shift
by more bits than an integer has differs between Python and GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, Const, Node, Type, Var, transform, walk

SMALLEST = 2.0**-150
"""Numbers up to this magnitude round to zero in float32."""


def misfit(
    row: str, operand: Node, constants: Mapping[str, int | float]
) -> tuple[str, str, str] | None:
    """Return code, message and hint if the second operand of a row is invalid, else None."""
    if row in ("div", "floordiv", "mod") and is_always_zero(operand, constants):
        hint = "change the divisor; a compile-time parameter counts as its value"
        return "zero-division", "the divisor is always zero", hint
    if row in ("lshift", "rshift") and _is_never_of_32_bits(operand, constants):
        return (
            "bad-shift",
            "the shift is not from 0 to 31",
            "shift by 0 to 31: integers have 32 bits",
        )
    return None


def is_always_zero(node: Node, constants: Mapping[str, int | float]) -> bool:
    """True if the value is zero for all values of its names.

    Names in `constants` have these values.
    """
    tree = _constant(node, constants)
    if isinstance(tree, Const):
        return tree.type is not Type.BOOL and abs(tree.value) <= SMALLEST
    return (
        isinstance(tree, Call) and tree.fn in ("add", "sub", "mul", "neg", "div") and _cancels(tree)
    )


def _is_never_of_32_bits(node: Node, constants: Mapping[str, int | float]) -> bool:
    """True if the number of bits is a constant below 0 or above 31."""
    tree = _constant(node, constants)
    return isinstance(tree, Const) and not 0 <= tree.value < 32


def _constant(node: Node, constants: Mapping[str, int | float]) -> Node:
    return transform(node, lambda n: _folded(n, constants))


def _folded(node: Node, constants: Mapping[str, int | float]) -> Node:
    """Return a constant if all operands are constants.

    A node without a value, such as log(-1), stays.
    """
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
    """True if sympy simplifies a sum or product to zero."""
    import sympy as sp

    from kgen.expr.algebra import Algebra

    if any(isinstance(n, Const) and not math.isfinite(n.value) for n in walk(tree)):
        return False
    return bool(sp.expand(Algebra().to_sympy(tree)) == 0)
