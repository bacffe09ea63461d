"""What an expression may name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kgen.expr.nodes import Node, Type


@dataclass(frozen=True)
class BufferType:
    """A buffer that an expression indexes with exactly `rank` integers; without any it is used by name."""

    element: Type
    rank: int
    shape: tuple[int | str | None, ...] | None = None
    """Its extents: numbers, names of sizes, or None for one that each call's tensor has of its own. None as a whole
    if expressions cannot use them."""

    @classmethod
    def of(cls, element: Type, shape: Sequence[int | str], unknown: str) -> BufferType:
        """A buffer of a declared shape, in which the word `unknown` stands for any extent."""
        extents = tuple(None if size == unknown else size for size in shape)
        return cls(element, len(extents), extents)


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
