"""Emitted Python without what nothing reads. Templates say where the last query of a tile is; not every mask asks."""

from __future__ import annotations

import ast
import re
from collections import Counter

PURE = frozenset({"minimum", "maximum", "cdiv", "where", "arange", "SliceLayout"})
"""What may be called in a value that is left out."""
_STATEMENT = re.compile(r"\n(?=[@\w])")
"""Between statements of a module."""
_ASSIGNMENT = re.compile(r"( +)(\w+(?:, \w+)*) = (.+)")
_NAME = re.compile(r"(?<!\.)\b\w+")
_TEXT = re.compile(r'""".*?"""', re.DOTALL)


def without_unused(source: str) -> str:
    """The source without assignments to names that occur nowhere else in their function, not in a comment either.

    What is called for its effect stays, and so do statements of several lines or alone in their block.
    """
    parts = _STATEMENT.split(source)
    return "\n".join(_without_assignments(part) if part.startswith("def ") else part for part in parts)


def _without_assignments(function: str) -> str:
    head, text, body = _head(function)
    lines, before = body.split("\n"), list[str]()
    while lines != before:
        before, words = lines, Counter(_NAME.findall("\n".join([head, *lines])))
        lines = []
        for number, line in enumerate(before):
            found = _ASSIGNMENT.fullmatch(line)
            names = found[2].split(", ") if found else []
            after = before[number + 1] if number + 1 < len(before) else ""
            if any(words[name] == 1 for name in names) and not _is_alone(lines[-1:], line, after):
                lines += _shortened(line, names, words)
            else:
                lines.append(line)
    return head + text + "\n".join(lines)


def _head(function: str) -> tuple[str, str, str]:
    """A function up to its docstring, the docstring, and what follows."""
    text = _TEXT.search(function)
    return (function[: text.start()], text[0], function[text.end() :]) if text else ("", "", function)


def _shortened(line: str, names: list[str], words: Counter[str]) -> list[str]:
    """A line without the names, and their values, that are written but once; none if no name is left."""
    left, _, right = line.partition(" = ")
    try:
        value = ast.parse(right, mode="eval").body
    except SyntaxError:  # it goes on in the next line
        return [line]
    values = value.elts if len(names) > 1 and isinstance(value, ast.Tuple) else [value]
    if len(values) != len(names):
        return [line]
    kept = [(n, v) for n, v in zip(names, values, strict=True) if words[n] > 1 or not _is_pure(v)]
    texts = (
        ", ".join(n for n, _ in kept),
        ", ".join(right[v.col_offset : v.end_col_offset] for _, v in kept),
    )
    return [left[: len(left) - len(left.lstrip())] + " = ".join(texts)] if kept else []


def _is_pure(value: ast.expr) -> bool:
    called = (node.func for node in ast.walk(value) if isinstance(node, ast.Call))
    return all(isinstance(function, ast.Attribute) and function.attr in PURE for function in called)


def _is_alone(before: list[str], line: str, after: str) -> bool:
    """Whether a line is what is left of its block: it comes after the beginning, and the next is less indented."""
    begins = any(re.search(r":\s*(#.*)?$", text) for text in before)
    return begins and _depth(after) < _depth(line)


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())
