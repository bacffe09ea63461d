"""How CuTe DSL spells an expression of scalars: a lookup in the function table, with brackets by precedence."""

from __future__ import annotations

from collections.abc import Mapping

from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, Const, Node, Type, Var
from kgen.expr.spelling import ADD, ATOM, COMPARE, MUL, UNARY


def spell(node: Node, names: Mapping[str, str], context: int = 0) -> str:
    """The text of an expression over variables; `names` says what an emitted kernel calls each.

    The text is bracketed where it binds less tightly than `context`.
    """
    text, binds = _form(node, names)
    return f"({text})" if binds < context else text


def _form(node: Node, names: Mapping[str, str]) -> tuple[str, int]:
    if isinstance(node, Const):
        text = repr(node.value)
        return text, UNARY if text.startswith("-") else ATOM
    if isinstance(node, Var):
        text = 'float("inf")' if node.name == "inf" else names[node.name]
        return text, ATOM if text.isidentifier() or text.endswith(("]", ")")) else MUL
    assert isinstance(node, Call), "reads were replaced by their values"
    row = TABLE[node.fn]
    spelling = row.spelled["cute"]
    infix = spelling.binds != ATOM
    args = [
        # The right operand of a left-associative operator is bracketed at equal strength: a - (b - c).
        spell(arg, names, spelling.operand + (infix and at > 0 and spelling.binds in (ADD, MUL, COMPARE)))
        for at, arg in enumerate(node.args)
    ]
    if row.result is Type.FLOAT and not infix:
        # Functions of reals take a Float32, neither integers nor Python's numbers.
        args = [
            f"Float32({text})" if isinstance(arg, Const) or arg.type.integral else text
            for arg, text in zip(node.args, args, strict=True)
        ]
    return spelling.form.format(*args), spelling.binds
