"""Arrays of numbers of a prime field, with the operations of Triton kernels.

Sums are not reduced, so integers stay integers. Products are reduced modulo the prime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from math import prod
from operator import mul
from typing import Any

from kgen.prove.functions import Beyond

PRIME = 2**31 - 1
NEVER = float("-inf")
"""The exponent of a power that is zero."""


@dataclass(frozen=True)
class Array:
    """An array in row-major order."""

    shape: tuple[int, ...]
    data: list[Any]


def field_of(value: float) -> Any:
    """Return a literal as a number of the field."""
    if value == NEVER or isinstance(value, int):
        return value
    exact = Fraction(value)
    if exact.denominator == 1:
        return exact.numerator
    return exact.numerator * pow(exact.denominator, -1, PRIME) % PRIME


def array(value: Any) -> Array:
    """Return a number as an array without axes."""
    return value if isinstance(value, Array) else Array((), [field_of(value)])


def strides(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous array."""
    return [prod(shape[n + 1 :]) for n in range(len(shape))]


def broadcast(value: Array, shape: tuple[int, ...]) -> list[Any]:
    """Return the elements of an array, repeated to a shape."""
    if value.shape == shape:
        return value.data
    own = (1,) * (len(shape) - len(value.shape)) + value.shape
    steps = [0 if size == 1 else step for size, step in zip(own, strides(own), strict=True)]
    found = [0]
    for size, step in zip(shape, steps, strict=True):
        found = [at + n * step for at in found for n in range(size)]
    data = value.data
    return [data[at] for at in found]


def common(*values: Array) -> tuple[int, ...]:
    """Return the shape to which arrays broadcast."""
    dims = max(len(v.shape) for v in values)
    padded = [(1,) * (dims - len(v.shape)) + v.shape for v in values]
    shape = tuple(max(sizes) for sizes in zip(*padded, strict=True))
    if any(
        size not in (1, whole) for one in padded for size, whole in zip(one, shape, strict=True)
    ):
        raise Beyond(f"shapes {[v.shape for v in values]} do not broadcast")
    return shape


def each(fn: Callable[..., Any], *values: Any) -> Array:
    """Apply a function to the elements of arrays."""
    arrays = [array(value) for value in values]
    shape = common(*arrays)
    return Array(shape, list(map(fn, *(broadcast(a, shape) for a in arrays))))


def permuted(value: Array, order: Sequence[int]) -> Array:
    """Return an array with its axes in another order."""
    steps = strides(value.shape)
    shape = tuple(value.shape[axis] for axis in order)
    places = [0]
    for axis in order:
        places = [at + n * steps[axis] for at in places for n in range(value.shape[axis])]
    return Array(shape, [value.data[at] for at in places])


def summed(value: Array, axis: int) -> Array:
    """Return the sums along an axis."""
    shape = value.shape[:axis] + value.shape[axis + 1 :]
    inner = prod(value.shape[axis + 1 :])
    size, outer = value.shape[axis], prod(value.shape[:axis])
    data = [
        sum(value.data[(o * size + n) * inner + i] for n in range(size))
        for o, i in product(range(outer), range(inner))
    ]
    return Array(shape, data)


def running(value: Array) -> Array:
    """Return the running sums along the first axis."""
    inner = prod(value.shape[1:])
    data = list(value.data)
    for at in range(inner, len(data)):
        data[at] += data[at - inner]
    return Array(value.shape, data)


def matrices(value: Array) -> Iterator[list[list[Any]]]:
    """Yield the matrices of an array's last two axes, as rows."""
    rows, columns = value.shape[-2:]
    for start in range(0, len(value.data), rows * columns):
        yield [value.data[start + r * columns : start + (r + 1) * columns] for r in range(rows)]


def product_of(a: Array, b: Array) -> Array:
    """Return the products of matrices."""
    if a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise Beyond(f"a product of shapes {a.shape} and {b.shape}")
    data: list[Any] = []
    for left, right in zip(matrices(a), matrices(b), strict=True):
        columns = list(zip(*([x % PRIME for x in row] for row in right), strict=True))
        for row in left:
            line = [x % PRIME for x in row]
            data += [sum(map(mul, line, column)) % PRIME for column in columns]
    return Array((*a.shape[:-1], b.shape[-1]), data)


def power(exponent: Any) -> int:
    """Return 2 to an integer, or zero for the exponent `NEVER`."""
    return 0 if exponent == NEVER else pow(2, exponent % (PRIME - 1), PRIME)


def root(value: int) -> int | None:
    """Return a square root in the field, or None."""
    found = pow(value % PRIME, (PRIME + 1) // 4, PRIME)
    return found if found * found % PRIME == value % PRIME else None
