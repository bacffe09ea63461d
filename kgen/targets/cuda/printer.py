"""Print expressions of one element in CUDA C++: scalars of float, int and long long.

The function table has the precedence of Python and puts operands in brackets where C++ differs.
Conversions between integers and reals are explicit, because overloads (`min`) and division in C++
do not convert as Python does. Integer sums and products are computed in unsigned types, because
signed overflow is undefined.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kgen.expr.functions import TABLE, WRAPPING
from kgen.expr.nodes import Call, Const, Node, Read, Type, Var
from kgen.expr.spelling import ATOM, UNARY, Accuracy
from kgen.targets.code import Code, Name, op, row, text

INFINITY = text("__int_as_float(0x7f800000)")


@dataclass
class Printer:
    """Print trees over scalars.

    `names` renames variables; `helpers` collects texts of functions to define.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    accuracy: Accuracy = "usual"
    helpers: set[str] = field(default_factory=set)

    def value(self, node: Node) -> Code:
        """Print the expression."""
        if isinstance(node, Const):
            return literal(node)
        if isinstance(node, Var):
            return INFINITY if node.name == "inf" else Name(self.names.get(node.name, node.name))
        if isinstance(node, Read):
            raise TypeError(f"elements of a norm are not indexed: {node.buffer}")
        return self._call(node)

    def real(self, node: Node) -> Code:
        """Print the expression, converted to float."""
        if not node.type.integral:
            return self.value(node)
        if isinstance(node, Const):
            return literal(Const(float(node.value), Type.FLOAT))
        return op("float({0})", self.value(node))

    def _call(self, node: Call) -> Code:
        if node.fn == "float" and node.args[0].type.integral:
            return self.real(node.args[0])
        of = TABLE[node.fn]
        spelling = of.spelling("cuda", self.accuracy)
        if spelling.helper:
            self.helpers.add(spelling.helper)
        if node.type.integral and node.fn in WRAPPING:
            return self._wrapping(node)
        mixed = of.result is Type.FLOAT or any(a.type is Type.FLOAT for a in node.args)
        # Overloads and templates need operands of one type.
        wide = spelling.binds == ATOM and not mixed and any(a.type is Type.LONG for a in node.args)

        def operand(a: Node) -> Code:
            if wide and a.type is Type.INT:
                return _cast("long long", self.value(a))
            return self.real(a) if mixed and a.type is not Type.BOOL else self.value(a)

        return row(node.fn, *map(operand, node.args), accuracy=self.accuracy)

    def _wrapping(self, node: Call) -> Code:
        args = [self.value(a) for a in node.args]
        if node.type is Type.INT:
            return op("int({0})", row(node.fn, *(op("unsigned({0})", a) for a in args)))
        return op(
            "((long long)({0}))", row(node.fn, *(_cast("unsigned long long", a) for a in args))
        )


def _cast(kind: str, value: Code) -> Code:
    return op(f"({kind}){{0}}", value, binds=UNARY, operand=UNARY)


def literal(node: Const) -> Code:
    """Print a number in C++, reals in single precision.

    A negative number binds like a unary minus.
    """
    if isinstance(node.value, bool):
        return text(str(node.value).lower())
    if not node.type.integral and math.isinf(node.value):
        return INFINITY if node.value > 0 else op("-{0}", INFINITY, binds=UNARY)
    written = str(node.value) if node.type.integral else f"{float(node.value)!r}f"
    return text(written, UNARY if written.startswith("-") else ATOM)
