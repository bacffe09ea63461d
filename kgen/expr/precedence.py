"""Check of bitwise operators next to a comparison: Python binds them tighter, which is wrong for
bools.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from kgen.expr.language import COMPARISONS
from kgen.expr.text_checks import span_between, span_of, wrong


def check_precedence(operand: ast.expr, operator: ast.cmpop, lines: Sequence[str]) -> None:
    """Raise for `a >= b & c >= d`, which Python reads as `a >= (b & c) >= d`, unless the operand
    has brackets.
    """
    if _is_bracketed(operand, lines):
        return
    symbol = COMPARISONS.get(type(operator), ("", ">="))[1]
    match operand:
        case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr() as bitwise, right=right):
            mark, word = ("&", "and") if isinstance(bitwise, ast.BitAnd) else ("|", "or")
            span = span_between(left, right, mark, lines)
            hint = f"write `{word}`, or put brackets around each comparison"
        case ast.BinOp(left=left, op=ast.BitXor(), right=right):
            mark, span = "^", span_between(left, right, "^", lines)
            hint = "put brackets around each comparison"
        case ast.UnaryOp(op=ast.Invert()):
            mark, span = "~", span_of(operand, lines)._replace(length=1)
            hint = "write `not`, or put brackets around the comparison"
        case _:
            return
    raise wrong(span, "precedence", f"`{mark}` binds tighter than `{symbol}`", hint)


def _is_bracketed(node: ast.expr, lines: Sequence[str]) -> bool:
    """True if an expression is in brackets of its own, which its syntax tree does not show."""
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before = "\n".join([*lines[:first], lines[first][: node.col_offset]])
    after = "\n".join([lines[last][node.end_col_offset or 0 :], *lines[last + 1 :]])
    return before.rstrip().endswith("(") and after.lstrip().startswith(")")
