"""How CUDA C++ spells an expression of one element: scalars, in float and int.

Precedence is the function table's, which keeps operands of comparisons and of `&&` and `||` bracketed wherever C++ and
Python disagree. Types are explicit: where a number meets a real, C++ would convert as Python does, but overloads
(`min`) and division would not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kgen.expr.functions import ADD, ATOM, COMPARE, MUL, OR, TABLE, TERNARY, UNARY
from kgen.expr.nodes import Call, Const, Node, Read, Type, Var


@dataclass
class Printer:
    """Prints trees over named scalars. `names` renames variables; `helpers` collects functions to define."""

    names: Mapping[str, str] = field(default_factory=dict)
    fast_math: bool = False
    helpers: set[str] = field(default_factory=set)

    def print(self, node: Node, context: int = TERNARY) -> str:
        """The expression, in brackets if it binds less tightly than `context`."""
        text, binds = self._form(node)
        return f"({text})" if binds < context else text

    def real(self, node: Node, context: int = TERNARY) -> str:
        """The expression as a float."""
        if node.type is not Type.INT:
            return self.print(node, context)
        if isinstance(node, Const):
            return self.print(Const(float(node.value), Type.FLOAT), context)
        return f"float({self.print(node)})"

    def _form(self, node: Node) -> tuple[str, int]:
        if isinstance(node, Const):
            return literal(node)
        if isinstance(node, Var):
            return (
                "__int_as_float(0x7f800000)" if node.name == "inf" else self.names.get(node.name, node.name)
            ), ATOM
        if isinstance(node, Read):
            raise TypeError(f"elements of a norm are not indexed: {node.buffer}")
        return self._call(node)

    def _call(self, node: Call) -> tuple[str, int]:
        row = TABLE[node.fn]
        spelling = row.fast["cuda"] if self.fast_math and "cuda" in row.fast else row.spelled["cuda"]
        if spelling.helper:
            self.helpers.add(spelling.helper)
        mixed = row.result is Type.FLOAT or any(a.type is Type.FLOAT for a in node.args)
        args = []
        for i, a in enumerate(node.args):
            need = spelling.operand
            if spelling.binds in (ADD, MUL, COMPARE) and i > 0:
                need += 1  # the right operand of a left-associative operator: a - (b - c)
            if spelling.binds == COMPARE:
                need = ADD
            if spelling.binds == TERNARY:
                need = OR if i == 0 else TERNARY
            args.append(self.real(a, need) if mixed and a.type is not Type.BOOL else self.print(a, need))
        return spelling.form.format(*args), spelling.binds


def literal(node: Const) -> tuple[str, int]:
    """A number as C++ writes it, reals in single precision; a negative one binds like a unary minus."""
    if isinstance(node.value, bool):
        return str(node.value).lower(), ATOM
    if node.type is Type.INT:
        text = str(node.value)
    elif math.isinf(node.value):
        text = ("-" if node.value < 0 else "") + "__int_as_float(0x7f800000)"
    else:
        text = repr(float(node.value)) + "f"
    return text, UNARY if text.startswith("-") else ATOM
