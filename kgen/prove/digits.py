"""Indices of a flat offset: its terms, each divided by the stride of a dimension."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import z3


@dataclass(frozen=True)
class Monomial:
    """A product of an integer and terms that are not sums or products (`factors`, by id)."""

    number: int
    factors: tuple[Any, ...] = ()

    @property
    def term(self) -> Any:
        """The product as a term."""
        return prod(self.factors, start=z3.IntVal(self.number))

    @property
    def counted(self) -> Counter[int]:
        """The number of times that each factor occurs."""
        return Counter(one.get_id() for one in self.factors)

    def __truediv__(self, other: Monomial) -> Monomial | None:
        """Return the exact quotient, or None."""
        if self.number % other.number or other.counted - self.counted:
            return None
        left, kept = other.counted, list[Any]()
        for one in self.factors:
            if left[one.get_id()]:
                left[one.get_id()] -= 1
            else:
                kept.append(one)
        return Monomial(self.number // other.number, tuple(kept))

    def __mul__(self, other: Monomial) -> Monomial:
        return Monomial(self.number * other.number, (*self.factors, *other.factors))

    def same(self, other: Monomial) -> bool:
        """True if both are the same product."""
        return self.number == other.number and self.counted == other.counted


def monomials(term: Any) -> list[Monomial]:
    """Return the products whose sum is a term."""
    term = z3.simplify(z3.IntVal(term) if isinstance(term, int) else term, som=True)
    return [_product(part) for part in (term.children() if z3.is_add(term) else [term])]


def _product(term: Any) -> Monomial:
    if z3.is_int_value(term):
        return Monomial(term.as_long())
    if not z3.is_mul(term):
        return Monomial(1, (term,))
    parts = [_product(part) for part in term.children()]
    return Monomial(prod(p.number for p in parts), tuple(f for p in parts for f in p.factors))


def monomial(term: Any) -> Monomial | None:
    """Return a term as one product, or None if it is a sum."""
    found = monomials(term)
    return found[0] if len(found) == 1 else None


def quotient(term: Any, divisor: Any) -> Any | None:
    """Return the exact quotient of a sum by a product, or None."""
    by = monomial(divisor)
    if by is None or not by.number:
        return None
    parts = [one / by for one in monomials(term)]
    if not all(parts):
        return None
    return z3.simplify(sum((p.term for p in parts if p is not None), z3.IntVal(0)))


ONE = Monomial(1)


@dataclass(frozen=True)
class Indexed:
    """The dimensions of a tensor, some of them merged, and an index in each."""

    sizes: tuple[Any, ...]
    indices: tuple[Any, ...]


def indexed(
    offset: Any, shape: Sequence[Any], limits: Mapping[int, Monomial], *, floor: bool = False
) -> Indexed:
    """Split an offset in elements into indices.

    The coefficient of each term is divided by the strides, from the first dimension on. `limits`
    bounds unknowns by their ids. An unknown below the product of two dimensions merges them.
    `floor`: quotients of negative coefficients are rounded down, not toward zero.
    """
    sizes = [monomial(size) for size in shape]
    dims = [size for size in sizes if size is not None]
    assert len(dims) == len(sizes), "every dimension is a product"
    parts = [one for one in monomials(offset) if one.number]
    while (merged := _merged(parts, dims, limits)) is not None:
        dims = merged
    indices = [z3.IntVal(0)] * max(1, len(dims))
    for part in parts:
        for number, found in _places(part, dims, floor):
            indices[number] = indices[number] + found.term
    return Indexed(tuple(d.term for d in dims) or (z3.IntVal(1),), tuple(indices))


def _places(
    part: Monomial, dims: Sequence[Monomial], floor: bool = False
) -> Iterator[tuple[int, Monomial]]:
    """Yield the dimensions among which a term is divided, and its part of each index."""
    left = part
    for number in range(len(dims)):
        stride = prod(dims[number + 1 :], start=Monomial(1))
        found = Monomial(1, left.factors) / Monomial(1, stride.factors)
        whole = left.number // stride.number
        if whole < 0 and not floor:
            whole = -(-left.number // stride.number)
        if found is not None and whole:
            yield number, Monomial(whole, found.factors)
            left = Monomial(left.number - whole * stride.number, left.factors)


def _merged(
    parts: Sequence[Monomial], dims: Sequence[Monomial], limits: Mapping[int, Monomial]
) -> list[Monomial] | None:
    """Return dimensions of which two are merged, or None."""
    for part in parts:
        for number, found in _places(part, dims):
            for one in found.factors if number else ():
                both = dims[number - 1] * dims[number]
                limit = limits.get(one.get_id())
                if found.number == 1 and limit is not None and limit.same(both):
                    return [*dims[: number - 1], both, *dims[number + 1 :]]
    return None
