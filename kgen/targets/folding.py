"""Wrap statements and lists of operands to a line width.

A call is broken after its opening bracket and between its arguments. A chain of one operator is put
into brackets and broken before an operator. Text without such parts stays on one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kgen.targets.branches import elif_of
from kgen.targets.code import (
    CUDA,
    Assign,
    Code,
    If,
    Op,
    Run,
    Statement,
    noted,
    operands_of,
    spell,
)

COLUMNS = 120
"""Maximum columns of a line of an emitted file."""
DEEPEST = 8
"""Maximum nesting of brackets that is indented.

Without it, the blanks in the text of nested operations would grow with the square of their number.
"""


@dataclass(frozen=True)
class _Room:
    """The width of lines in a language, and the levels of brackets that can still be indented."""

    language: str
    width: int
    deeper: int = DEEPEST

    @property
    def indent(self) -> str:
        """The indentation of lines inside brackets."""
        return " " * 4 if self.deeper else ""

    def within(self) -> _Room:
        """Return the room of lines inside brackets."""
        return _Room(self.language, self.width - len(self.indent), max(self.deeper - 1, 0))

    def bracketed(self, head: str, lines: Iterable[str], tail: str) -> list[str]:
        """Return lines inside brackets that `head` opens and `tail` closes."""
        return [head, *(f"{self.indent}{line}" for line in lines), tail]


@dataclass(frozen=True)
class Bracketed:
    """`head`, operands separated by commas, and `tail`.

    Operands that do not fit are on separate lines.
    """

    head: str
    operands: tuple[str, ...]
    tail: str

    def lines(self, width: int) -> list[str]:
        """Print lines of at most `width` columns, as far as they can be broken."""
        line = f"{self.head}{', '.join(self.operands)}{self.tail}"
        if len(line) <= width or not self.operands:
            return [line]
        operands = filled((f"{operand}," for operand in self.operands), width - 4)
        return [self.head, *_set_in(operands), self.tail]


def folded(statements: Iterable[Statement], language: str, width: int) -> list[str]:
    """Print statements in lines of at most `width` columns, as far as they can be broken."""
    return [line for statement in statements for line in _of_statement(statement, language, width)]


def filled(parts: Iterable[str], width: int) -> list[str]:
    """Join parts with blanks, as many on a line as fit."""
    found: list[str] = []
    for part in parts:
        if found and len(found[-1]) + 1 + len(part) <= width:
            found[-1] += f" {part}"
        else:
            found.append(part)
    return found


def _of_statement(statement: Statement, language: str, width: int) -> list[str]:
    whole = statement.lines(language)
    if language == CUDA or all(len(line) <= width for line in whole):
        return whole
    room = _Room(language, width)
    if isinstance(statement, If):
        head = _broken("if ", statement.test, f":{noted(statement.note, language)}", room)
        then = folded(statement.then, language, width - 4)
        return [*head, *_set_in(then), *_otherwise(statement.other, language, width)]
    if isinstance(statement, Run):
        return _broken("", statement.value, "", room)
    if isinstance(statement, Assign) and len(statement.values) == 1:
        target, note = (
            f"{', '.join(statement.names)} {statement.sign} ",
            noted(statement.note, language),
        )
        return _broken(target, statement.value, note, room)
    return whole


def _otherwise(other: tuple[Statement, ...], language: str, width: int) -> list[str]:
    """Print `else` and its statements, or `elif` if the only one is another condition."""
    match other:
        case ():
            return []
        case (If(),):
            return elif_of(folded(other, language, width - 2))
    return ["else:", *_set_in(folded(other, language, width - 4))]


def _broken(head: str, value: Code, tail: str, room: _Room) -> list[str]:
    """Print `head`, a value and `tail` on lines that fit."""
    line = f"{head}{spell(value, room.language)}{tail}"
    if len(line) <= room.width or not isinstance(value, Op) or not value.args:
        return [line]
    operator, chain = _chain(value, room.language)
    if len(chain) > 1:
        return _over_lines(head, operator, chain, tail, room)
    form = value.spelled[room.language].form
    name = form.partition("(")[0]
    before, _, behind = form.partition("{0}")
    around = not name.replace(".", "_").isidentifier() and form.count("{") == 1
    if around and operands_of(value, room.language)[0] == spell(value.args[0], room.language):
        # A sign, a cast or an index goes around the lines of its operand.
        return _broken(head + before, value.args[0], behind + tail, room)
    name, _, arguments = form.removesuffix(")").partition("(")
    if not name.replace(".", "_").isidentifier() or f"{name}({arguments})" != form:
        return [line]
    return room.bracketed(f"{head}{name}(", _arguments(value, arguments, room.within()), f"){tail}")


def _arguments(value: Op, form: str, room: _Room) -> list[str]:
    """Print the arguments of a call on one line if they fit, else each on its own lines."""
    texts = operands_of(value, room.language)
    together = form.format(*texts)
    if len(together) <= room.width:
        return [together]
    found: list[str] = []
    for argument in _separated(form):
        before, field, _ = argument.partition("{")
        whole = f"{argument.format(*texts)},"
        if field and argument.endswith("}") and argument.count("{") == 1:
            operand = int(argument[len(before) + 1 : -1])
            if texts[operand] == spell(value.args[operand], room.language):
                found += _broken(before, value.args[operand], ",", room)
                continue
        found.append(whole)
    return found


def _separated(form: str) -> Iterator[str]:
    """Split a form at the commas outside of brackets."""
    depth, argument = 0, ""
    for letter in form:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            yield argument.strip()
            argument = ""
        else:
            argument += letter
    yield argument.strip()


def _over_lines(
    head: str, operator: str, chain: list[tuple[Code, str]], tail: str, room: _Room
) -> list[str]:
    """Print a chain of one operator, with as many operands on a line as fit."""
    inner = room.within()
    if all(len(f"{operator} {text}") <= inner.width for _, text in chain):
        parts = [chain[0][1], *(f"{operator} {text}" for _, text in chain[1:])]
        return room.bracketed(f"{head}(", filled(parts, inner.width), f"){tail}")
    (first, text), *rest = chain
    behind = "".join(f" {operator} {other}" for _, other in rest)
    if text == spell(first, room.language) and len(behind + tail) < room.width // 4:
        return _broken(head, first, behind + tail, room)
    found: list[str] = []
    for operand, text in chain:
        before = f"{operator} " * bool(found)
        bare = text == spell(operand, room.language)
        found += _broken(before + "(" * (not bare), operand, ")" * (not bare), inner)
    return room.bracketed(f"{head}(", found, f"){tail}")


def _chain(value: Op, language: str) -> tuple[str, list[tuple[Code, str]]]:
    """Return an operator and the operands of its chain with their texts; no operands if the value
    is not a chain.
    """
    form = value.spelled[language].form
    operator, _, right = form.removeprefix("{0} ").partition(" ")
    if form != f"{{0}} {operator} {right}" or right not in ("{1}", "({1})"):
        return "", []
    texts = operands_of(value, language)
    first, last = (value.args[0], texts[0]), (value.args[1], right.format(*texts))
    return operator, [part for operand in (first, last) for part in _links(operand, form, language)]


def _links(operand: tuple[Code, str], form: str, language: str) -> list[tuple[Code, str]]:
    """Return the operands of a chain that is an operand without brackets, else the operand."""
    value, text = operand
    within = (
        isinstance(value, Op)
        and value.spelled[language].form == form
        and text == spell(value, language)
    )
    return _chain(value, language)[1] if within and isinstance(value, Op) else [operand]


def _set_in(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]
