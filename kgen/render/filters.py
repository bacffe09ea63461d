"""What templates put around operands and values, which may not be there."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

WIDTH = 112
"""Columns of a line of operands."""


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


def unpacked(names: Sequence[str]) -> str:
    """Names as Python unpacks into them: one alone has a comma behind it."""
    return ", ".join(names) + "," * (len(names) == 1)


def alternatives(conditions: Sequence[str]) -> str:
    """Conditions of C++ behind another, any of which is enough."""
    return "".join(f" || {c}" for c in conditions)


def lines(text: str | Sequence[str] | None, indent: int) -> str:
    """Lines of code, set in, with an end of line behind each; statements that hold others are of several lines."""
    statements = [text.removesuffix("\n")] if isinstance(text, str) and text else text or ()
    found = (line for statement in statements for line in statement.split("\n"))
    return "".join(f"{' ' * indent * bool(line)}{line}\n" for line in found)


FILTERS: dict[str, Callable[..., object]] = {
    "ahead": ahead,
    "alternatives": alternatives,
    "and": around(" & {}"),
    "behind": behind,
    "each": each,
    "entries": entries,
    "join": join,
    "factor": around("{} * "),
    "lines": lines,
    "loaded": around(", mask={}, other=0.0"),
    "minus": around(" - {}"),
    "onto": around("{} + "),
    "parameters": parameters,
    "or": around(" or {}"),
    "plus": around(" + {}"),
    "said": said,
    "sentence": around(" {}"),
    "stored": around(", mask={}"),
    "times": around(" * {}"),
    "tuple": as_tuple,
    "unpacked": unpacked,
    "wrapped": wrapped,
}
"""Of operands in a list; of the guards of a load and of a store; of a term and a factor."""
