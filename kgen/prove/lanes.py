"""Values of Triton kernels as z3 terms. One lane of a vector stands for all lanes.

The lane of an axis is an unknown below the size of the axis. Axes at the same position with the
same size share it, as they do when Triton broadcasts operands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import z3

from kgen.prove.functions import Beyond

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor, with the terms of its sizes. Integers count as data that any value may have.

    `most` bounds its strides by dimension; a missing entry means any 64-bit stride.
    """

    name: str
    shape: tuple[Any, ...]
    integer: bool = False
    most: Mapping[int, int] = field(default_factory=dict)
    zeros: bool = False
    """True if the launcher fills it with zeros."""
    terms: tuple[Summed, ...] = ()
    """The sums of other tensors whose sum it is."""


@dataclass(frozen=True)
class Summed:
    """A sum over some dimensions of a tensor."""

    tensor: Tensor
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Num:
    """An integer or a boolean, with its width in bits."""

    term: Any
    bits: int = 32
    shape: Shape = ()


@dataclass(frozen=True)
class Data:
    """A real number. `term` is None if nothing is known about it.

    A running sum has its summands in `steps`. `names` has the unknowns of its program and loops
    that the number depends on; None for all.
    """

    term: Any = None
    shape: Shape = ()
    steps: Any = None
    names: frozenset[str] | None = None


@dataclass(frozen=True)
class Stride:
    """The stride of a dimension, and its width as a parameter of the kernel."""

    tensor: Tensor
    dim: int
    bits: int


@dataclass(frozen=True)
class Offset:
    """A sum of products of counts and strides of a tensor."""

    tensor: Tensor
    counts: Mapping[int, Any]
    bits: int
    shape: Shape = ()


@dataclass(frozen=True)
class Pointer:
    """An address: elements after the start of a tensor, and multiples of its strides."""

    tensor: Tensor
    plain: Any = field(default_factory=lambda: z3.IntVal(0))
    counts: Mapping[int, Any] = field(default_factory=dict)
    shape: Shape = ()


@dataclass(frozen=True)
class Lost:
    """The value of a name that a loop assigns, before the loop assigns it."""

    name: str


@dataclass(frozen=True)
class Range:
    """The numbers of a loop whose bounds are unknown."""

    low: Any
    high: Any
    step: int


Vector = Num | Data | Pointer | Offset


def lane(dims: int, axis: int, size: int) -> Any:
    """Return the lane of an axis of a vector with `dims` axes."""
    return z3.Int(f"lane{axis}of{dims}.{size}")


def moved(value: Vector, places: Sequence[int], dims: int) -> Vector:
    """Return a vector whose axis n is moved to the axis `places[n]` of `dims` axes."""
    shape = [1] * dims
    pairs = []
    for axis, (size, place) in enumerate(zip(value.shape, places, strict=True)):
        shape[place] = size
        if size > 1:
            pairs.append((lane(len(value.shape), axis, size), lane(dims, place, size)))
    return replace(_changed(value, pairs), shape=tuple(shape))


def _changed(value: Vector, pairs: Sequence[tuple[Any, Any]]) -> Vector:
    """Return a value with other lanes."""

    def other(term: Any) -> Any:
        return term if term is None else z3.substitute(term, *pairs)

    match value:
        case Num():
            return replace(value, term=other(value.term))
        case Data():
            return replace(value, term=other(value.term), steps=other(value.steps))
        case Pointer():
            counts = {dim: other(count) for dim, count in value.counts.items()}
            return replace(value, plain=other(value.plain), counts=counts)
        case Offset():
            return replace(value, counts={dim: other(c) for dim, c in value.counts.items()})


def expanded(value: Vector, index: tuple[Any, ...]) -> Vector:
    """Return `value[index]`, whose index has only `:` and None."""
    places = [n for n, part in enumerate(index) if part is not None]
    if any(part not in (None, slice(None)) for part in index):
        raise Beyond(f"index {index}")
    if isinstance(value, Data) and len(value.shape) != len(places):
        return Data(names=value.names)
    return moved(value, places, len(index))


def joined(*shapes: Shape) -> Shape:
    """Return the shape to which shapes broadcast."""
    longest = max(shapes, key=len)
    found = list(longest)
    for shape in shapes:
        for n, size in enumerate(shape):
            at = n + len(longest) - len(shape)
            found[at] = max(found[at], size)
    return tuple(found)


def names_of(*values: Any) -> frozenset[str] | None:
    """Return the unknowns that values depend on, apart from lanes; None for all."""
    found = frozenset[str]()
    for value in values:
        if isinstance(value, Data):
            if value.names is None:
                return None
            found |= value.names
        elif isinstance(value, Num):
            found |= {name for name in constants([value.term]) if not name.startswith("lane")}
        elif isinstance(value, Pointer | Offset | Lost):
            return None
    return found


_CONSTANTS: dict[int, tuple[Any, dict[str, Any]]] = {}
"""Unknowns in terms, by the ids of the terms. Stored terms keep their ids."""


def constants(terms: Sequence[Any]) -> dict[str, Any]:
    """Return the unknowns in terms by name."""
    found: dict[str, Any] = {}
    for term in terms:
        if term.get_id() not in _CONSTANTS:
            own = {
                one.decl().name(): one
                for one in parts_of([term])
                if z3.is_const(one) and one.decl().kind() == z3.Z3_OP_UNINTERPRETED
            }
            _CONSTANTS[term.get_id()] = term, own
        found |= _CONSTANTS[term.get_id()][1]
    return found


def of_lanes(terms: Sequence[Any]) -> list[Any]:
    """Return the bounds of the lanes in terms."""
    found = []
    for name, term in constants(terms).items():
        if name.startswith("lane"):
            found += [term >= 0, term < int(name.rpartition(".")[2].rstrip("'"))]
    return found


def parts_of(terms: Sequence[Any]) -> list[Any]:
    """Return all parts of terms, each once."""
    seen: dict[int, Any] = {}
    waiting = list(terms)
    while waiting:
        part = waiting.pop()
        if part.get_id() not in seen:
            seen[part.get_id()] = part
            waiting += part.children()
    return list(seen.values())


def shape_of(value: Any) -> Shape:
    """Return the shape of a value; numbers of Python have none."""
    return value.shape if isinstance(value, Num | Data | Pointer | Offset) else ()
