"""The names that an expression may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kgen.expr.nodes import Node, Type


@dataclass(frozen=True)
class BufferType:
    """A buffer that an expression indexes with exactly `rank` integers.

    With rank 0 it is used by name.
    """

    element: Type
    rank: int
    shape: tuple[int | str | None, ...] | None = None
    """Extents: numbers, names of sizes, or None for the size of the tensor of a call. None as a
    whole if expressions cannot use extents.
    """

    @classmethod
    def of(cls, element: Type, shape: Sequence[int | str], unknown: str) -> BufferType:
        """Return a buffer with a declared shape, in which the word `unknown` stands for any
        extent.
        """
        extents = tuple(None if size == unknown else size for size in shape)
        return cls(element, len(extents), extents)


@dataclass(frozen=True)
class Scope:
    """The names that an expression may use. `elsewhere` explains why a well-known name is missing.

    `constants` has the values of compile-time parameters. A divisor that they make zero is an
    error.
    """

    variables: Mapping[str, Type]
    buffers: Mapping[str, BufferType]
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, int | float] = field(default_factory=dict)
    meanings: Mapping[str, Node] = field(default_factory=dict)
    """Names that stand for expressions of the other names."""

    @property
    def names(self) -> frozenset[str]:
        """Names of scalar values."""
        return frozenset((*self.variables, *self.meanings))
