"""Values and statements of kernels as trees. Each language prints them as the last step.

The expressions of a plan (`kgen/expr/nodes.py`) define the result. A `Code` defines how a kernel
computes it: a name is a row or a column of a tile, and a read is a guarded load. Passes use these
trees to find uses of names, and to move or remove statements. `str` prints Triton; `spell` and
`lines` print any of the `LANGUAGES`. A form with `{tl}`, the module, is for Triton and Gluon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from kgen.expr.functions import TABLE
from kgen.expr.nodes import Const
from kgen.expr.spelling import (
    ADD,
    ATOM,
    COMPARE,
    MODULES,
    MUL,
    TERNARY,
    UNARY,
    Accuracy,
    Spelling,
    in_modules,
)
from kgen.targets.branches import elif_of

TRITON = "triton"
GLUON = "gluon"
CUDA = "cuda"
CUTE = "cute"
TORCH = "torch"
LANGUAGES = (*MODULES, CUDA, CUTE, TORCH)
"""The languages of kernels, and of launchers (torch). All but CUDA are Python."""


class Code:
    """A value: a `Name`, or an `Op` of other values."""

    names: frozenset[str]
    """All names in the value."""

    def __str__(self) -> str:
        return spell(self)

    def __format__(self, spec: str) -> str:
        return format(spell(self), spec)


@dataclass(frozen=True)
class Name(Code):
    """A variable, a parameter or a constant of a kernel."""

    name: str

    @cached_property
    def names(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({self.name})

    __str__, __format__ = Code.__str__, Code.__format__


@dataclass(frozen=True)
class Op(Code):
    """An operation, identified by `fn`, with its spelling in each language."""

    fn: str
    args: tuple[Code, ...]
    spelled: Mapping[str, Spelling] = field(compare=False, repr=False)

    @cached_property
    def names(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset().union(*(a.names for a in self.args))

    @cached_property
    def operands(self) -> dict[str, tuple[str, ...]]:
        """The texts of the operands by language, as far as they were asked for: each breaking of a
        line asks again.
        """
        return {}

    __str__, __format__ = Code.__str__, Code.__format__


def spell(code: Code, language: str = TRITON, context: int = TERNARY) -> str:
    """Print a value, in brackets if it binds less tightly than its `context`."""
    if isinstance(code, Name):
        return code.name
    assert isinstance(code, Op)
    own = code.spelled[language]
    text = own.form.format(*operands_of(code, language))
    return f"({text})" if own.binds < context else text


def operands_of(code: Op, language: str) -> tuple[str, ...]:
    """Print the operands of an operation, in brackets where it needs them."""
    if language not in code.operands:
        code.operands[language] = _operands(code, language)
    return code.operands[language]


def _operands(code: Op, language: str) -> tuple[str, ...]:
    own = code.spelled[language]
    # The right operand of a left-associative operator is bracketed at equal strength: a - (b - c).
    infix = own.binds in (ADD, MUL, COMPARE)
    contexts = (min(own.operand + (infix and i > 0), ATOM) for i in range(len(code.args)))
    return tuple(spell(a, language, c) for a, c in zip(code.args, contexts, strict=True))


@cache
def _spelled(form: str, binds: int, operand: int) -> Mapping[str, Spelling]:
    forms = dict.fromkeys(LANGUAGES, form) | in_modules(form)
    return {language: Spelling(text, binds, operand) for language, text in forms.items()}


def op(
    form: str, *args: Code | str | int, fn: str = "", binds: int = ATOM, operand: int = TERNARY
) -> Op:
    """Build an operation from a format over its operands (`spelling.in_modules`)."""
    operands = tuple(a if isinstance(a, Code) else Name(str(a)) for a in args)
    return Op(fn or form, operands, _spelled(form, binds, operand))


def row(fn: str, *args: Code | str | int, accuracy: Accuracy = "usual") -> Op:
    """Build a call of a function or operator of the table."""
    spelled = {language: TABLE[fn].spelling(language, accuracy) for language in LANGUAGES}
    return Op(fn, tuple(a if isinstance(a, Code) else Name(str(a)) for a in args), spelled)


def text(value: str, binds: int = ATOM) -> Op:
    """Build a constant from its text."""
    return op(value.replace("{", "{{").replace("}", "}}"), fn=value, binds=binds)


def number(node: Const) -> Op:
    """Build a number in the syntax of Python. A negative number binds like a unary minus."""
    written = repr(node.value)
    return text(written, UNARY if written.startswith("-") else ATOM)


NOTHING = text("")
"""An argument, or a term, that is left out."""


def walk(code: Code) -> Iterator[Code]:
    """Yield a value and all its parts, the whole first."""
    yield code
    if isinstance(code, Op):
        for a in code.args:
            yield from walk(a)


def calls(code: Code, *fns: str) -> bool:
    """Return True if a value contains any of these operations."""
    return any(isinstance(part, Op) and part.fn in fns for part in walk(code))


def helpers_of(values: Iterable[Code], language: str) -> set[str]:
    """Return the texts of helper functions that values call and a file must define."""
    parts = (part for value in values for part in walk(value) if isinstance(part, Op))
    return {helper for part in parts if (helper := part.spelled[language].helper) is not None}


def rewritten(code: Code, change: Callable[[Code], Code | None]) -> Code:
    """Replace parts of a value, from the outside in.

    `change` returns the replacement, or None to keep a part.
    """
    changed = change(code)
    if changed is not None:
        return changed
    if not isinstance(code, Op):
        return code
    args = tuple(rewritten(a, change) for a in code.args)
    return code if args == code.args else replace(code, args=args)


def renamed(code: Code, values: Mapping[str, Code]) -> Code:
    """Replace names in a value by other values."""
    return rewritten(code, lambda part: values.get(part.name) if isinstance(part, Name) else None)


class Statement:
    """A statement of a kernel, or of a launcher."""

    defines: frozenset[str]
    """The names that the statement assigns."""
    uses: frozenset[str]
    """The names whose values the statement reads."""

    @property
    def names_in_order(self) -> tuple[str, ...]:
        """The names that the statement assigns, in the order of the text."""
        return tuple(sorted(self.defines))

    def lines(self, language: str = TRITON) -> list[str]:
        """Print the statement, as a list of lines."""
        raise NotImplementedError

    def map(self, change: Callable[[Code], Code]) -> Statement:
        """Return the statement with each value replaced by `change`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Assign(Statement):
    """`names = values`, or `name += value`: as many values as names, or one value that is unpacked.

    In C++ there is one name. With a `type`, the statement declares it as a constant; Python ignores
    the type.
    """

    names: tuple[str, ...]
    values: tuple[Code, ...]
    sign: str = "="
    note: str = field(default="", compare=False)
    type: str = ""

    @cached_property
    def defines(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(self.names)

    @cached_property
    def uses(self) -> frozenset[str]:  # type: ignore[override]
        own = frozenset[str]() if self.sign == "=" else self.defines
        return own.union(*(v.names for v in self.values))

    @property
    def names_in_order(self) -> tuple[str, ...]:
        return self.names

    @property
    def name(self) -> str:
        """The one name."""
        (name,) = self.names
        return name

    @property
    def value(self) -> Code:
        """The one value."""
        (value,) = self.values
        return value

    def lines(self, language: str = TRITON) -> list[str]:
        if language == CUDA:
            to = f"const {self.type} {self.name}" if self.type else self.name
            return [f"{to} {self.sign} {spell(self.value, CUDA)};{noted(self.note, CUDA)}"]
        values = ", ".join(spell(v, language) for v in self.values)
        return [f"{', '.join(self.names)} {self.sign} {values}{noted(self.note, language)}"]

    def map(self, change: Callable[[Code], Code]) -> Assign:
        return replace(self, values=tuple(change(v) for v in self.values))


@dataclass(frozen=True)
class Run(Statement):
    """A call for its effect."""

    value: Code
    note: str = field(default="", compare=False)
    defines = frozenset[str]()

    @property
    def uses(self) -> frozenset[str]:  # type: ignore[override]
        return self.value.names

    def lines(self, language: str = TRITON) -> list[str]:
        end = ";" * (language == CUDA)
        return [f"{spell(self.value, language)}{end}{noted(self.note, language)}"]

    def map(self, change: Callable[[Code], Code]) -> Run:
        return replace(self, value=change(self.value))


@dataclass(frozen=True)
class If(Statement):
    """`if` and `else`. In C++, the condition is known at compile time (`if constexpr`)."""

    test: Code
    then: tuple[Statement, ...]
    other: tuple[Statement, ...] = ()
    note: str = ""

    @cached_property
    def defines(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset().union(*(s.defines for s in (*self.then, *self.other)))

    @cached_property
    def uses(self) -> frozenset[str]:  # type: ignore[override]
        return self.test.names.union(*(s.uses for s in (*self.then, *self.other)))

    def lines(self, language: str = TRITON) -> list[str]:
        if language == CUDA:
            return self._in_braces()
        head = f"if {spell(self.test, language)}:{noted(self.note, language)}"
        return [head, *_indented(self.then, language), *self._otherwise(language)]

    def _otherwise(self, language: str) -> list[str]:
        """Print `else` and its statements, or `elif` if the only one is another condition."""
        match self.other:
            case ():
                return []
            case (If() as only,):
                return elif_of(only.lines(language))
        return ["else:", *_indented(self.other, language)]

    def _in_braces(self) -> list[str]:
        """Print C++. A single statement without `else` and note is on the line of its condition."""
        head, then = f"if constexpr ({spell(self.test, CUDA)})", lines_of(self.then, CUDA)
        if len(then) == 1 and not self.other and not self.note:
            return [f"{head} {then[0]}"]
        other = ["} else {", *_indented(self.other, CUDA)] if self.other else []
        return [f"{head} {{{noted(self.note, CUDA)}", *_indented(self.then, CUDA), *other, "}"]

    def map(self, change: Callable[[Code], Code]) -> If:
        test = change(self.test)
        then, other = (tuple(s.map(change) for s in part) for part in (self.then, self.other))
        return replace(self, test=test, then=then, other=other)


@dataclass(frozen=True)
class Repeat(Statement):
    """Statements that run `count` times, in Python."""

    count: Code
    body: tuple[Statement, ...]
    note: str = field(default="", compare=False)

    @cached_property
    def defines(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset().union(*(s.defines for s in self.body))

    @cached_property
    def uses(self) -> frozenset[str]:  # type: ignore[override]
        return self.count.names.union(*(s.uses for s in self.body))

    def lines(self, language: str = TRITON) -> list[str]:
        head = f"for _ in range({spell(self.count, language)}):{noted(self.note, language)}"
        return [head, *_indented(self.body, language)]

    def map(self, change: Callable[[Code], Code]) -> Repeat:
        body = tuple(s.map(change) for s in self.body)
        return replace(self, count=change(self.count), body=body)


def noted(note: str, language: str) -> str:
    """Return a comment for the end of a line, or nothing."""
    return f"  {'//' if language == CUDA else '#'} {note}" if note else ""


def _indented(statements: Iterable[Statement], language: str) -> list[str]:
    return [f"    {line}" for s in statements for line in s.lines(language)]


def assign(name: str, value: Code | str, note: str = "") -> Assign:
    """Build an assignment of one value to one name; `note` is a comment after it."""
    return Assign((name,), (value if isinstance(value, Code) else Name(value),), note=note)


def lines_of(statements: Iterable[Statement], language: str = TRITON) -> list[str]:
    """Print statements, as a list of lines."""
    return [line for s in statements for line in s.lines(language)]


def uses_of(parts: Iterable[Statement | Code | None]) -> frozenset[str]:
    """Return the names that statements and values read. Skip None."""
    there = [p for p in parts if p is not None]
    return frozenset().union(*(p.names if isinstance(p, Code) else p.uses for p in there))


def codes(statements: Iterable[Statement]) -> list[Code]:
    """Return all values of statements."""
    found: list[Code] = []

    def keep(code: Code) -> Code:
        found.append(code)
        return code

    for statement in statements:
        statement.map(keep)
    return found


def with_names(statement: Statement, names: Mapping[str, str]) -> Statement:
    """Rename the names in a statement, including those that it assigns."""
    if isinstance(statement, If):
        then, other = (
            tuple(with_names(s, names) for s in part) for part in (statement.then, statement.other)
        )
        return replace(statement, test=_with(statement.test, names), then=then, other=other)
    if isinstance(statement, Repeat):
        body = tuple(with_names(s, names) for s in statement.body)
        return replace(statement, count=_with(statement.count, names), body=body)
    changed = statement.map(lambda code: _with(code, names))
    if not isinstance(changed, Assign):
        return changed
    return replace(changed, names=tuple(names.get(name, name) for name in changed.names))


def _with(code: Code, names: Mapping[str, str]) -> Code:
    return renamed(code, {name: Name(other) for name, other in names.items()})


def needed(statements: Iterable[Statement], by: Iterable[str]) -> list[Statement]:
    """Return the statements on which the names `by` depend, directly or indirectly."""
    used, found = set(by), list[Statement]()
    for statement in reversed(list(statements)):
        if used & statement.defines:
            used |= statement.uses | statement.defines
            found.insert(0, statement)
    return found


def at_first_use(
    statements: Iterable[Statement], definitions: Iterable[Statement]
) -> list[Statement]:
    """Insert each definition before the first statement that uses it, or at the end."""
    found = list(statements)
    for definition in definitions:
        uses = (i for i, s in enumerate(found) if definition.defines & s.uses)
        found.insert(next(uses, len(found)), definition)
    return found


# Values of kernels that are not in the function table.


def minimum(a: Code | str | int, b: Code | str | int) -> Op:
    return op("{tl}.minimum({0}, {1})", a, b, fn="minimum")


def maximum(a: Code | str | int, b: Code | str | int) -> Op:
    return op("{tl}.maximum({0}, {1})", a, b, fn="maximum")


def cdiv(a: Code | str, b: Code | str) -> Op:
    """Divide integers, rounded up."""
    return op("{tl}.cdiv({0}, {1})", a, b, fn="cdiv")


def over(a: Code | str, b: Code | str | int) -> Op:
    """Divide integers that are not negative, rounded down."""
    return op("{0} // {1}", a, b, fn="over", binds=MUL, operand=MUL)


def total(first: Code, *rest: Code) -> Code:
    """Add all terms."""
    for term in rest:
        first = row("add", first, term)
    return first


def conjunction(conditions: Iterable[Code]) -> Code | None:
    """Combine conditions with `and`; None without conditions."""
    found: Code | None = None
    for condition in conditions:
        found = condition if found is None else row("and", found, condition)
    return found


def load(address: Code, guard: Code | None = None) -> Op:
    """Load from an address; zero where the guard is false."""
    if guard is None:
        return op("{tl}.load({0})", address, fn="load")
    return op("{tl}.load({0}, mask={1}, other=0)", address, guard, fn="load")


def times(a: Code | str, b: Code | str) -> Op:
    """Multiply. Factors are in brackets unless they are names or calls."""
    return op("{0} * {1}", a, b, fn="mul", binds=MUL, operand=ATOM)


def atom(value: Code | str, form: str = "{0}") -> Op:
    """Put a value into a form, in brackets unless it is a name or a call."""
    return op(form, value, operand=ATOM)


def printed(value: Any, language: str = TRITON) -> Any:
    """Print values and statements, also inside lists and mappings, for a template.

    Keep other objects.
    """
    if isinstance(value, Code):
        return spell(value, language)
    if isinstance(value, Statement):
        return "\n".join(value.lines(language))
    if isinstance(value, dict):
        return {name: printed(v, language) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(printed(v, language) for v in value)
    return value


def as_type(value: Code | str, dtype: str) -> Op:
    """Cast a tensor of a Triton or Gluon kernel to another dtype."""
    return op(f"{{0}}.to({{tl}}.{dtype})", value, fn=f"to {dtype}", operand=ATOM)
