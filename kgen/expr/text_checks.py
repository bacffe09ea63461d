"""Checks of the text of an expression before Python's parser, for clearer errors and safe input."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence
from typing import NamedTuple

MAX_LENGTH = 10_000
MAX_DEPTH = 64


class ExpressionError(Exception):
    """An error in the text of an expression. `line` and `column` are 1-based inside the text."""

    def __init__(
        self, code: str, message: str, hint: str | None, line: int, column: int, length: int
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.line = line
        self.column = column
        self.length = length


class Span(NamedTuple):
    """A position in the text, 1-based."""

    line: int
    column: int
    length: int


def span_of(node: ast.expr | ast.stmt | ast.keyword, lines: Sequence[str]) -> Span:
    """Return the span of a node, or of its first line if it has several."""
    column, end = node.col_offset, node.end_col_offset
    if end is None or node.end_lineno != node.lineno:
        end = len(lines[node.lineno - 1].rstrip())
    return Span(node.lineno, column + 1, max(end - column, 1))


def span_between(left: ast.expr, right: ast.expr, symbol: str, lines: Sequence[str]) -> Span:
    """Return the span of the operator between two operands; only brackets and blanks are there
    besides it.
    """
    line, column = left.end_lineno or left.lineno, left.end_col_offset or left.col_offset
    pattern = re.compile(r"\s+".join(map(re.escape, symbol.split())))
    while line <= right.lineno:
        if found := pattern.search(lines[line - 1], column):
            return Span(line, found.start() + 1, found.end() - found.start())
        line, column = line + 1, 0
    return span_of(left, lines)


def wrong(span: Span, code: str, message: str, hint: str | None = None) -> ExpressionError:
    return ExpressionError(code, message, hint, *span)


# --- before the parser: what must not reach it, and what it would explain badly -------------------


def without_comments(text: str) -> str:
    # The language has no strings, so `#` always begins a comment. Only ends of lines are removed:
    # positions stay.
    return re.sub(r"#[^\n]*", "", text)


def at_index(text: str, index: int, length: int = 1) -> Span:
    line = text.count("\n", 0, index) + 1
    return Span(line, index - (text.rfind("\n", 0, index) + 1) + 1, length)


def check_characters(text: str) -> None:
    if not text.strip():
        raise wrong(
            Span(1, 1, 1),
            "empty-expression",
            "the expression is empty",
            "write its value on the last line",
        )
    if len(text) > MAX_LENGTH:
        raise wrong(
            Span(1, 1, 1),
            "too-large",
            f"the expression has {len(text)} characters, the limit is {MAX_LENGTH}",
            "move tables of numbers into a buffer",
        )
    # ASCII only: Python would normalize look-alike letters, and it counts columns in bytes.
    if found := re.search(r"[^\n\t\x20-\x7e]", text):
        raise wrong(
            at_index(text, found.start()),
            "bad-character",
            f"the character U+{ord(found[0]):04X} cannot be used in an expression",
            "use plain ASCII letters, digits and operators",
        )
    if found := re.search(r"&&|\|\||!(?!=)|\?", text):
        hint = {
            "&&": "write `and`",
            "||": "write `or`",
            "!": "write `not`",
            "?": "write `a if condition else b`",
        }
        span = at_index(text, found.start(), len(found[0]))
        raise wrong(span, "syntax-error", f"`{found[0]}` is not an operator", hint[found[0]])
    if found := re.search(r"\d{400,}", text):
        raise literal_error(at_index(text, found.start(), len(found[0])))


def check_brackets(text: str) -> None:
    pairs = {")": "(", "]": "[", "}": "{"}
    opened: list[int] = []
    for i, character in enumerate(text):
        if character in "([{":
            opened.append(i)
            if len(opened) > MAX_DEPTH:
                raise too_deep(at_index(text, i))
        elif character in pairs:
            if not opened or text[opened[-1]] != pairs[character]:
                message = f"`{character}` closes nothing"
                raise wrong(
                    at_index(text, i),
                    "unbalanced-bracket",
                    message,
                    "remove it, or add the opening one",
                )
            opened.pop()
    if opened:
        span = at_index(text, opened[-1])
        raise wrong(
            span, "unbalanced-bracket", f"`{text[opened[-1]]}` is never closed", "close the bracket"
        )


def module(text: str) -> list[ast.stmt]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text).body
    except IndentationError as error:
        span = clipped(text, error.lineno, 1)
        raise wrong(
            span,
            "syntax-error",
            "the indentation changes here",
            "begin every line in the same column",
        ) from None
    except SyntaxError as error:
        # The messages of Python differ between its versions; these must not.
        span = clipped(text, error.lineno, error.offset)
        raise wrong(
            span,
            "syntax-error",
            "this is not a valid expression",
            "add the operand or the operator that is missing here",
        ) from None
    except (RecursionError, MemoryError):
        raise too_deep(Span(1, 1, 1)) from None


def clipped(text: str, line: int | None, column: int | None) -> Span:
    lines = text.split("\n")
    row = min(max(line or 1, 1), len(lines))
    return Span(row, min(max(column or 1, 1), len(lines[row - 1]) + 1), 1)


def too_deep(span: Span) -> ExpressionError:
    message = f"the expression nests more than {MAX_DEPTH} deep"
    return wrong(
        span,
        "too-deep",
        message,
        "split it into balanced parts with brackets, or move numbers into a buffer",
    )


def literal_error(span: Span) -> ExpressionError:
    return wrong(
        span,
        "literal-range",
        "the number does not fit in 32 bits",
        "integers are int32, real numbers are float32",
    )
