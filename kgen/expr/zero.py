"""Whether a divisor is zero whatever the tensors hold: a constant, or terms that cancel.

It is refused where it is written. A quotient by zero means nothing, and sympy would make `zoo` of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, Const, Node, Type, Var, transform, walk

SMALLEST = 2.0**-150
"""What is no larger is zero in float32."""


def is_always_zero(node: Node, constants: Mapping[str, int | float]) -> bool:
    """Whether the value is zero for all values of its names but `constants`, which have theirs."""
    tree = transform(node, lambda n: _folded(n, constants))
    if isinstance(tree, Const):
        return tree.type is not Type.BOOL and abs(tree.value) <= SMALLEST
    return isinstance(tree, Call) and tree.fn in ("add", "sub", "mul", "neg", "div") and _cancels(tree)


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
