"""Print expressions of scalars in CuTe DSL: Python, but functions of reals need a Float32."""

from __future__ import annotations

from collections.abc import Mapping

from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, Const, Node, Type, Var
from kgen.expr.spelling import ATOM
from kgen.targets.code import Code, number, op, row, text

INFINITY = text('float("inf")')


def value(node: Node, names: Mapping[str, Code]) -> Code:
    """Print an expression. `names` maps each variable to its value in the kernel."""
    if isinstance(node, Const):
        return number(node)
    if isinstance(node, Var):
        return INFINITY if node.name == "inf" else names[node.name]
    assert isinstance(node, Call), "reads were replaced by their values"
    of = TABLE[node.fn]
    # Operators convert their operands; functions accept neither integers nor Python numbers.
    converts = of.result is Type.FLOAT and of.spelled["cute"].binds == ATOM
    return row(node.fn, *((real if converts else value)(arg, names) for arg in node.args))


def real(node: Node, names: Mapping[str, Code]) -> Code:
    """Print an expression, converted to Float32 if it is a number or an integer."""
    found = value(node, names)
    return op("Float32({0})", found) if isinstance(node, Const) or node.type.integral else found
