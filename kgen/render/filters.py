"""What templates put around operands and values, which may not be there."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from itertools import zip_longest

from kgen.targets.code import GLUON, Statement
from kgen.targets.folding import COLUMNS, Bracketed, folded

WIDTH = 112
"""Columns of a line of operands."""
SET_IN = {GLUON: 12}
"""Columns by which templates of a language are set in where others include them."""


def around(form: str) -> Callable[[object], str]:
    """A filter that sets a value into a form, and makes nothing of None."""
    return lambda value: "" if value is None else form.format(value)


def wrapped(operands: Sequence[str] | Sequence[Sequence[str]], indent: int) -> str:
    """Operands with a comma behind each, on lines that fit; lists of operands begin lines of their own."""
    if operands and not isinstance(operands[0], str):
        return "\n".join(wrapped(line, indent) for line in operands)
    text = textwrap.fill(
        ", ".join(str(o).replace(" ", "\0") for o in operands) + ",",
        WIDTH - indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return textwrap.indent(text.replace("\0", " "), " " * indent)


def parameters(declared: Sequence[str]) -> str:
    """The parameters of a function with their parentheses, on one line if they fit."""
    flat = f"({', '.join(declared)})"
    return flat if len(flat) <= 72 else f"(\n{wrapped(declared, 4)}\n)"


def entries(pairs: Sequence[tuple[str, str]], indent: int) -> str:
    """A dictionary with these entries in Python, on one line if they fit."""
    found = [f'"{name}": {value}' for name, value in pairs]
    flat = f"{{{', '.join(found)}}}"
    inner = "".join(f"{' ' * (indent + 4)}{one},\n" for one in found)
    return flat if indent + len(flat) <= 112 else f"{{\n{inner}{' ' * indent}}}"


def ahead(operands: Sequence[str] | None) -> str:
    """Operands ahead of others, a comma behind each."""
    return "".join(f"{o}, " for o in operands or ())


def behind(operands: Sequence[str] | None) -> str:
    """Operands behind others, a comma before each."""
    return "".join(f", {o}" for o in operands or ())


def each(names: Sequence[str], form: str) -> list[str]:
    """A form of every name."""
    return [form.format(name) for name in names]


def as_tuple(operands: Sequence[str]) -> str:
    """Operands as a tuple."""
    return f"({', '.join(operands)}{',' if len(operands) == 1 else ''})"


def join(operands: Sequence[object], between: str) -> str:
    """Operands with a text between each two."""
    return between.join(map(str, operands))


def said(message: str, function: str) -> str:
    """A message of a function, formatted if it has fields."""
    return f'{"f" * ("{" in message)}"{function}: {message}"'


def raised(message: str, error: str, function: str) -> Bracketed:
    """The statement that raises an error with a message of a function."""
    return Bracketed(f"raise {error}(", (said(message, function),), ")")


def unpacked(names: Sequence[str]) -> str:
    """Names as Python unpacks into them: one alone has a comma behind it."""
    return ", ".join(names) + "," * (len(names) == 1)


def alternatives(conditions: Sequence[str]) -> str:
    """Conditions of C++ behind another, any of which is enough."""
    return "".join(f" || {c}" for c in conditions)


def bracketed(operands: Sequence[object], head: str, tail: str = ")") -> Bracketed:
    """Operands between `head`, which ends with a bracket, and `tail`: on one line, or on lines that fit."""
    return Bracketed(head, tuple(map(str, operands)), tail)


def spread(operands: Sequence[str], indent: int) -> str:
    """Operands on lines that fit, with nothing behind the last."""
    return wrapped(operands, indent).removesuffix(",")


def within(operands: Sequence[str], indent: int) -> str:
    """Operands behind a bracket; further lines are set in."""
    return spread(operands, indent).strip()


def columns(operands: Sequence[str], indent: int) -> str:
    """Two operands a line, the second ones below each other."""
    width = max(map(len, operands)) + 2
    pairs = zip_longest(operands[::2], operands[1::2], fillvalue="")
    found = (f"{' ' * indent}{f'{a},':<{width}}{b}{',' * bool(b)}".rstrip() for a, b in pairs)
    return "\n".join(found)


def lines(value: object, language: str, indent: int, more: int = 0) -> str:
    """Lines of code, set in, with an end of line behind each; what is too long for a line is broken.

    They may be set in by `more` columns later.
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
"""Of operands in a list; of the guards of a load and of a store; of a term and a factor."""
