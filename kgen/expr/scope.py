"""What an expression may name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kgen.expr.nodes import Node, Type


@dataclass(frozen=True)
class BufferType:
    """A buffer that an expression indexes with exactly `rank` integers; without any it is used by name."""

    element: Type
    rank: int


@dataclass(frozen=True)
class Scope:
    """The names that an expression may use. `elsewhere` says why a well-known name is not among them.

    `constants` are the values of the variables that are compiled in: a divisor that they make zero is an error.
    """

    variables: Mapping[str, Type]
    buffers: Mapping[str, BufferType]
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, int | float] = field(default_factory=dict)
    meanings: Mapping[str, Node] = field(default_factory=dict)
    """Names that stand for expressions of the others."""

    @property
    def names(self) -> frozenset[str]:
        """Of values."""
        return frozenset((*self.variables, *self.meanings))
