"""Whether a divisor is zero whatever the tensors hold: a constant, or terms that cancel.

It is refused where it is written. A quotient by zero means nothing, and sympy would make `zoo` of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from kgen.expr.nodes import Call, Const, Node, Type, Var, transform, walk

SMALLEST = 2.0**-150
"""What is no larger is zero in float32."""

NUMBERS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "neg", "floordiv", "mod")},
    **{name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    **{name: getattr(math, name) for name in ("exp", "log", "log2", "sqrt", "tanh", "sin", "cos", "floor")},
    "div": operator.truediv,
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
    "not": operator.not_,
    "where": lambda condition, a, b: a if condition else b,
    "min": min,
    "max": max,
    "abs": abs,
    "exp2": lambda x: 2.0**x,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "clamp": lambda x, low, high: min(max(x, low), high),
    "float": float,
}
"""The rows of the function table for plain numbers."""


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
        value = NUMBERS[node.fn](*(a.value for a in node.args if isinstance(a, Const)))
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
