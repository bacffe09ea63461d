"""How CUDA C++ spells an expression of one element: scalars, in float, int and long long.

Precedence is the function table's, which keeps operands of comparisons and of `&&` and `||` bracketed wherever C++ and
Python disagree. Types are explicit: where a number meets a real, C++ would convert as Python does, but overloads
(`min`) and division would not. Sums and products of integers are made of unsigned ones: those may wrap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kgen.expr.functions import TABLE, WRAPPING
from kgen.expr.nodes import Call, Const, Node, Read, Type, Var
from kgen.expr.spelling import ADD, ATOM, COMPARE, MUL, OR, TERNARY, UNARY


@dataclass
class Printer:
    """Prints trees over named scalars. `names` renames variables; `helpers` collects texts of functions to
    define."""

    names: Mapping[str, str] = field(default_factory=dict)
    fast_math: bool = False
    helpers: set[str] = field(default_factory=set)

    def print(self, node: Node, context: int = TERNARY) -> str:
        """The expression, in brackets if it binds less tightly than `context`."""
        text, binds = self._form(node)
        return f"({text})" if binds < context else text

    def real(self, node: Node, context: int = TERNARY) -> str:
        """The expression as a float."""
        if not node.type.integral:
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
        if node.fn == "float" and node.args[0].type.integral:
            return self.real(node.args[0]), ATOM
        row = TABLE[node.fn]
        spelling = row.fast["cuda"] if self.fast_math and "cuda" in row.fast else row.spelled["cuda"]
        if spelling.helper:
            self.helpers.add(spelling.helper)
        mixed = row.result is Type.FLOAT or any(a.type is Type.FLOAT for a in node.args)
        if node.type.integral and node.fn in WRAPPING:
            return self._wrapping(node, spelling.form), ATOM
        # An overload is chosen, or a template's type found, by operands of one type.
        wide = spelling.binds == ATOM and not mixed and any(a.type is Type.LONG for a in node.args)
        args = []
        for i, a in enumerate(node.args):
            need = spelling.operand
            if spelling.binds in (ADD, MUL, COMPARE) and i > 0:
                need += 1  # the right operand of a left-associative operator: a - (b - c)
            if spelling.binds == COMPARE:
                need = ADD
            if spelling.binds == TERNARY:
                need = OR if i == 0 else TERNARY
            if wide and a.type is Type.INT:
                args.append(f"(long long){self.print(a, UNARY)}")
            else:
                args.append(self.real(a, need) if mixed and a.type is not Type.BOOL else self.print(a, need))
        return spelling.form.format(*args), spelling.binds

    def _wrapping(self, node: Call, form: str) -> str:
        if node.type is Type.INT:
            return f"int({form.format(*(f'unsigned({self.print(a)})' for a in node.args))})"
        operands = (f"(unsigned long long){self.print(a, UNARY)}" for a in node.args)
        return f"((long long)({form.format(*operands)}))"


def literal(node: Const) -> tuple[str, int]:
    """A number as C++ writes it, reals in single precision; a negative one binds like a unary minus."""
    if isinstance(node.value, bool):
        return str(node.value).lower(), ATOM
    if node.type.integral:
        text = str(node.value)
    elif math.isinf(node.value):
        text = ("-" if node.value < 0 else "") + "__int_as_float(0x7f800000)"
    else:
        text = repr(float(node.value)) + "f"
    return text, UNARY if text.startswith("-") else ATOM
