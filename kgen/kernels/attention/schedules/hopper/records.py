"""Named tuples, in which a Hopper kernel passes values to its functions.

Emitted files use Python's named tuples, not Gluon aggregates. Triton treats them as its own tuples
everywhere, including partitions. Aggregates have a public name only since Triton 3.8. They need the
type of every field, and before 3.8 a constructor for each class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TypeVar

from kgen.targets.code import Code, Name, Statement, renamed
from kgen.targets.folding import Bracketed

TAKEN = frozenset({"type", "values"})
"""Attribute names that Triton's tuples already use."""


def field_of(name: str) -> str:
    """Return the field that holds a variable."""
    return f"{name}_" if name in TAKEN else name


@dataclass(frozen=True)
class Record:
    """A named tuple: its class, the variable that holds it, and its fields by variable name."""

    name: str
    variable: str
    given: Mapping[str, str]
    """The value of each field when the record is built."""

    @property
    def names(self) -> list[str]:
        """The variables that the fields hold."""
        return [*self.given]

    @property
    def defined(self) -> Bracketed:
        """The statement that defines the class."""
        fields = tuple(f'"{field_of(name)}"' for name in self.given)
        return Bracketed(f'{self.name} = collections.namedtuple("{self.name}", [', fields, "])")

    @property
    def made(self) -> Bracketed:
        """The statement that builds a record."""
        return Bracketed(f"{self.variable} = {self.name}(", tuple(self.given.values()), ")")

    @property
    def reach(self) -> dict[str, str]:
        """The expression of each variable, in a function that has the record as a parameter."""
        return {name: f"{self.variable}.{field_of(name)}" for name in self.given}


def record(
    name: str, variable: str, names: Sequence[str], made: Mapping[str, str] | None = None
) -> Record:
    """Return a record of variables. `made` has the values of fields that are not variables of
    the same name.
    """
    return Record(name, variable, {n: (made or {}).get(n, n) for n in names})


T = TypeVar("T")


def reached(value: T, names: Mapping[str, str]) -> T:
    """Replace variables in a value, and in nested dataclasses and sequences, by their
    expressions.
    """
    return _reached(value, {name: Name(other) for name, other in names.items()})  # type: ignore[return-value]


def _reached(value: object, names: Mapping[str, Code]) -> object:
    if isinstance(value, Code):
        return renamed(value, names)
    if isinstance(value, Statement):
        return value.map(lambda code: renamed(code, names))
    if isinstance(value, list):
        return [_reached(part, names) for part in value]
    if isinstance(value, tuple):
        return tuple(_reached(part, names) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value,
            **{f.name: _reached(getattr(value, f.name), names) for f in fields(value) if f.init},
        )
    return value
