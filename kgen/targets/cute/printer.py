"""How CuTe DSL has an expression of scalars: as Python has it, but that functions of reals take a Float32."""

from __future__ import annotations

from collections.abc import Mapping

from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, Const, Node, Type, Var
from kgen.expr.spelling import ATOM
from kgen.targets.code import Code, number, op, row, text

INFINITY = text('float("inf")')


def value(node: Node, names: Mapping[str, Code]) -> Code:
    """An expression over variables; `names` says what an emitted kernel has for each."""
    if isinstance(node, Const):
        return number(node)
    if isinstance(node, Var):
        return INFINITY if node.name == "inf" else names[node.name]
    assert isinstance(node, Call), "reads were replaced by their values"
    of = TABLE[node.fn]
    # Operators convert by themselves; functions take neither integers nor Python's numbers.
    converts = of.result is Type.FLOAT and of.spelled["cute"].binds == ATOM
    return row(node.fn, *((real if converts else value)(arg, names) for arg in node.args))


def real(node: Node, names: Mapping[str, Code]) -> Code:
    """The same as a Float32, which a number and what is made of integers alone are not by themselves."""
    found = value(node, names)
    return op("Float32({0})", found) if isinstance(node, Const) or node.type.integral else found
