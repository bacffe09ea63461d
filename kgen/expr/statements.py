"""The lines of an expression: definitions of local names, and the value on the last line."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from kgen.expr import language
from kgen.expr.nodes import Type
from kgen.expr.text_checks import Span, span_of, wrong


def definition(statement: ast.stmt, lines: Sequence[str]) -> tuple[ast.Name, ast.expr]:
    """Return the name and the value of a line before the last, or raise `ExpressionError`."""
    if isinstance(statement, ast.Assign):
        target = statement.targets[0]
        if len(statement.targets) == 1 and isinstance(target, ast.Name):
            return target, statement.value
        message = "a line before the last must define exactly one name"
        raise wrong(
            span_of(statement.targets[-1], lines), "bad-statement", message, "write `x = ...`"
        )
    if isinstance(statement, ast.Expr):
        raise wrong(
            span_of(statement, lines),
            "bad-statement",
            "this line has a value, but it is not the last line",
            "write `x = ...`, or put brackets around an expression of several lines",
        )
    raise language.no_statement(statement, span_of(statement, lines))


def last_value(statement: ast.stmt, lines: Sequence[str]) -> ast.expr:
    """Return the value of the last line, or raise `ExpressionError`."""
    if isinstance(statement, ast.Expr):
        return statement.value
    if isinstance(statement, ast.Assign):
        raise wrong(
            span_of(statement, lines),
            "bad-statement",
            "the last line is a definition, not a value",
            "compare with `==`, or add a last line with the value",
        )
    raise language.no_statement(statement, span_of(statement, lines))


def check_result(found: Type, needed: Type, span: Span) -> None:
    """Raise `ExpressionError` if the value of an expression does not have the type it needs."""
    is_truth = found is Type.BOOL
    rules = {
        Type.FLOAT: (
            is_truth,
            "a number",
            "use `where(condition, score, -inf)`, or move the condition into `mask_mod`",
        ),
        Type.BOOL: (
            not is_truth,
            "a bool",
            "compare it, for example `x > 0`: true keeps the pair",
        ),
    }
    wrong_, what, hint = rules.get(needed, (not found.integral, "an integer", "use `//`"))
    if wrong_:
        message = f"the value must be {what}, not {language.kind_of(found)}"
        raise wrong(span, "wrong-type", message, hint)
