"""Filters with which templates join optional operands and values."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from itertools import zip_longest

from kgen.targets.code import GLUON, Statement
from kgen.targets.folding import COLUMNS, Bracketed, folded

BEHIND = 8
"""Columns for the text behind operands that end inside a line."""
SET_IN = {GLUON: 12}
"""Indentation of included templates, in columns, by language."""


def around(form: str) -> Callable[[object], str]:
    """Return a filter that formats a value, and returns an empty text for None."""
    return lambda value: "" if value is None else form.format(value)


def wrapped(operands: Sequence[str] | Sequence[Sequence[str]], indent: int, more: int = 0) -> str:
    """Join operands with a comma after each, on lines of at most `COLUMNS` columns.

    Each inner list starts a line. `more` are the columns that a line gets later: indentation or a
    text behind it.
    """
    if operands and not isinstance(operands[0], str):
        return "\n".join(wrapped(line, indent, more) for line in operands)
    text = textwrap.fill(
        ", ".join(str(o).replace(" ", "\0") for o in operands) + ",",
        COLUMNS - indent - more,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return textwrap.indent(text.replace("\0", " "), " " * indent)


def parameters(declared: Sequence[str]) -> str:
    """Format the parameters of a function with parentheses, on one line if they fit."""
    flat = f"({', '.join(declared)})"
    return flat if len(flat) <= 72 else f"(\n{wrapped(declared, 4)}\n)"


def entries(pairs: Sequence[tuple[str, str]], indent: int) -> str:
    """Format a Python dictionary with these entries, on one line if they fit."""
    found = [f'"{name}": {value}' for name, value in pairs]
    flat = f"{{{', '.join(found)}}}"
    inner = "".join(f"{' ' * (indent + 4)}{one},\n" for one in found)
    return flat if indent + len(flat) <= 112 else f"{{\n{inner}{' ' * indent}}}"


def ahead(operands: Sequence[str] | None) -> str:
    """Join operands with a comma after each, to put before others."""
    return "".join(f"{o}, " for o in operands or ())


def behind(operands: Sequence[str] | None) -> str:
    """Join operands with a comma before each, to put after others."""
    return "".join(f", {o}" for o in operands or ())


def each(names: Sequence[str], form: str) -> list[str]:
    """Format each name."""
    return [form.format(name) for name in names]


def as_tuple(operands: Sequence[str]) -> str:
    """Format operands as a Python tuple."""
    return f"({', '.join(operands)}{',' if len(operands) == 1 else ''})"


def join(operands: Sequence[object], between: str) -> str:
    """Join operands with a text between them."""
    return between.join(map(str, operands))


def said(message: str, function: str) -> str:
    """Return a literal of `function: message`, an f-string if the message has fields."""
    return f'{"f" * ("{" in message)}"{function}: {message}"'


def raised(message: str, error: str, function: str) -> Bracketed:
    """The statement that raises an error with a message of a function."""
    return Bracketed(f"raise {error}(", (said(message, function),), ")")


def unpacked(names: Sequence[str]) -> str:
    """Join names as targets of an unpacking: a single name gets a trailing comma."""
    return ", ".join(names) + "," * (len(names) == 1)


def alternatives(conditions: Sequence[str]) -> str:
    """Join conditions of C++ with `||`, to put after another condition."""
    return "".join(f" || {c}" for c in conditions)


def bracketed(operands: Sequence[object], head: str, tail: str = ")") -> Bracketed:
    """Put operands between `head`, which ends with a bracket, and `tail`, on one line or on several
    that fit.
    """
    return Bracketed(head, tuple(map(str, operands)), tail)


def spread(operands: Sequence[str], indent: int) -> str:
    """Join operands on lines that fit, without a trailing comma."""
    return wrapped(operands, indent, BEHIND).removesuffix(",")


def within(operands: Sequence[str], indent: int) -> str:
    """Join operands after a bracket; further lines are indented."""
    return spread(operands, indent).strip()


def columns(operands: Sequence[str], indent: int) -> str:
    """Join operands in two aligned columns."""
    width = max(map(len, operands)) + 2
    pairs = zip_longest(operands[::2], operands[1::2], fillvalue="")
    found = (f"{' ' * indent}{f'{a},':<{width}}{b}{',' * bool(b)}".rstrip() for a, b in pairs)
    return "\n".join(found)


def lines(value: object, language: str, indent: int, more: int = 0) -> str:
    """Indent lines of code, break those that are too long, and end each with a newline.

    `more` is the indentation that a caller may add later, in columns.
    """
    found = _lines(value, language, COLUMNS - indent - max(more, SET_IN.get(language, 0)))
    return "".join(f"{' ' * indent * bool(line)}{line}\n" for line in found)


def _lines(value: object, language: str, width: int) -> list[str]:
    if isinstance(value, Statement):
        return folded([value], language, width)
    if isinstance(value, Bracketed):
        return value.lines(width)
    if isinstance(value, list | tuple):
        return [line for one in value for line in _lines(one, language, width)]
    return str(value).removesuffix("\n").split("\n") if value else []


FILTERS: dict[str, Callable[..., object]] = {
    "ahead": ahead,
    "alternatives": alternatives,
    "and": around(" & {}"),
    "behind": behind,
    "bracketed": bracketed,
    "columns": columns,
    "each": each,
    "entries": entries,
    "join": join,
    "factor": around("{} * "),
    "loaded": around(", mask={}, other=0.0"),
    "minus": around(" - {}"),
    "onto": around("{} + "),
    "parameters": parameters,
    "or": around(" or {}"),
    "plus": around(" + {}"),
    "raised": raised,
    "said": said,
    "spread": spread,
    "within": within,
    "sentence": around(" {}"),
    "stored": around(", mask={}"),
    "times": around(" * {}"),
    "tuple": as_tuple,
    "unpacked": unpacked,
    "wrapped": wrapped,
}
"""Filters by their name in templates: for lists of operands, for guards of loads and stores, for
terms and factors.
"""
