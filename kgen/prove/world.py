"""What a proof knows: sizes and params as unknown integers, buffers as functions that nothing is known of.

A buffer that the spec declares sorted ascends: that is stated for every two of its elements that an obligation names,
so that no formula has a quantifier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import z3

from kgen.expr.nodes import Type, Var
from kgen.expr.unparse import show

LONGEST = 2**29
"""Sizes are at most that."""
MOST = 2**30
"""Run-time params and elements of int32 buffers are at most that far from zero."""
MOST_WIDE = 2**62
"""The same of elements of int64 buffers."""

SHORT = 2**20
"""Denominators of literals that are taken for fractions."""
ROUNDING = Fraction(1, 2**48)
"""How far a literal may be from its fraction: a few roundings of float64."""

IN_RANGE_MS = 500


_OF_TABLE = "()"
"""Behind the name of a function of the table: a buffer may have the same name."""


def of_table(name: str) -> str | None:
    """The row of the function table that a function of z3 stands for; None if it is a buffer."""
    return name.removesuffix(_OF_TABLE) if name.endswith(_OF_TABLE) else None


@dataclass(frozen=True, eq=False)
class Place:
    """An element of a buffer: its name is written when it is shown, for terms are slow to print."""

    buffer: str
    indices: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.buffer}[{', '.join(map(shown, self.indices))}]" if self.indices else self.buffer


@dataclass(frozen=True)
class Buffer:
    """A declared buffer: its sizes are numbers or names."""

    shape: tuple[int | str, ...]
    dtype: str
    ascends: bool
    within: int | None = None
    """No element is further from zero; None for the bound of its dtype."""


@dataclass
class World:
    """The unknowns of one family of obligations, and what is taken for granted of them (`facts`)."""

    buffers: Mapping[str, Buffer]
    facts: list[Any] = field(default_factory=list)
    shown: dict[str | Place, Any] = field(default_factory=dict)
    """What a counterexample gives the values of, by name."""
    _quotients: list[tuple[Any, Any, Any]] = field(default_factory=list)
    _functions: dict[str, Any] = field(default_factory=dict)
    _elements: dict[str, dict[tuple[int, ...], tuple[Any, ...]]] = field(default_factory=dict)
    _searches: dict[tuple[str | int, ...], tuple[Any, ...]] = field(default_factory=dict)
    _known: dict[int, tuple[Any, bool]] = field(default_factory=dict)

    def integer(self, name: str, low: int | None = None, high: Any = None) -> Any:
        """An unknown integer between two bounds, inclusive."""
        found = z3.Int(name)
        if name not in self.shown:
            self.shown[name] = found
            self.facts += [] if low is None else [found >= low]
            self.facts += [] if high is None else [found <= high]
        return found

    def divides(self, whole: Any, one: Any, other: Any) -> None:
        """State that a number is a product of two, so that it divided by one of them is the other."""
        self.facts.append(whole == one * other)
        self._quotients += [(whole, one, other), (whole, other, one)]

    def quotient(self, a: Any, b: Any) -> Any | None:
        """What is known to be `a // b`."""
        return next((found for x, y, found in self._quotients if x.eq(a) and y.eq(b)), None)

    def length(self, size: int | str) -> Any:
        """A size of a buffer."""
        if isinstance(size, int):
            return z3.IntVal(size)
        return self.integer(show(Var(size, Type.INT)), 0, LONGEST)

    def function(self, name: str, *sorts: Any) -> Any:
        """A function of which nothing is known but its name."""
        if name not in self._functions:
            self._functions[name] = z3.Function(name, *sorts)
        return self._functions[name]

    def of_row(self, fn: str, sort: Any, args: Sequence[Any]) -> Any:
        """What a row of the function table gives, of which nothing is known but that it is a function."""
        return self.function(f"{fn}{_OF_TABLE}", *(a.sort() for a in args), sort)(*args)

    def inside(self, buffer: str, indices: tuple[Any, ...]) -> Any:
        """That an element is there."""
        sizes = self.buffers[buffer].shape
        parts = [z3.And(i >= 0, i < self.length(s)) for i, s in zip(indices, sizes, strict=True)]
        return z3.And(*parts) if parts else z3.BoolVal(True)

    def read(self, buffer: str, indices: tuple[Any, ...]) -> Any:
        """The value of an element as a spec means it: zero where it is not there."""
        element, inside = self.element(buffer, indices), self.inside(buffer, indices)
        if self.holds(inside):
            return element
        zero = z3.RealVal(0) if element.sort() == z3.RealSort() else z3.IntVal(0)
        return z3.If(inside, element, zero)

    def element(self, buffer: str, indices: tuple[Any, ...]) -> Any:
        """The element at a place where there is one."""
        of = self.buffers[buffer]
        real = of.dtype in ("fp32", "bf16", "fp16", "any")
        sort = z3.RealSort() if real else z3.IntSort()
        indices = tuple(z3.simplify(i) for i in indices)
        # z3 has a function without arguments as a constant.
        found = (
            self.function(f"{buffer}", *[z3.IntSort()] * len(indices), sort)(*indices)
            if indices
            else z3.Const(buffer, sort)
        )
        known = self._elements.setdefault(buffer, {})
        key = tuple(i.get_id() for i in indices)
        if key in known:
            return found
        if not real:
            most = of.within or {"bool": 1, "int64": MOST_WIDE}.get(of.dtype, MOST)
            self.facts += [found >= (0 if of.dtype == "bool" else -most), found <= most]
        if of.ascends:
            for other in known.values():
                self._ascending(buffer, indices, other)
                self._ascending(buffer, other, indices)
        known[key] = indices
        self.shown[Place(buffer, indices)] = found
        return found

    def _ascending(self, buffer: str, first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
        of, function = self.buffers[buffer], self._functions[buffer]
        same = [a == b for a, b in zip(first[:-1], second[:-1], strict=True)]
        there = [first[-1] >= 0, first[-1] <= second[-1], second[-1] < self.length(of.shape[-1])]
        self.facts.append(z3.Implies(z3.And(*same, *there), function(*first) <= function(*second)))

    def first_at_least(self, buffer: str, row: tuple[Any, ...], value: Any) -> Any:
        """The first position of a sorted row whose element is not smaller than a value, its length where there is
        none."""
        value, row = z3.simplify(value), tuple(z3.simplify(i) for i in row)
        key = (buffer, *(i.get_id() for i in (*row, value)))
        if key in self._searches:
            return self._searches[key][0]
        size = self.length(self.buffers[buffer].shape[-1])
        found = self.integer(f"{buffer} from {len(self._searches)}", 0)
        # Terms are kept: the number of one that is gone may become that of another.
        self._searches[key] = (found, value, *row)
        self.facts.append(found <= size)
        before, at = self.element(buffer, (*row, found - 1)), self.element(buffer, (*row, found))
        self.facts += [z3.Implies(found > 0, before < value), z3.Implies(found < size, at >= value)]
        return found

    def holds(self, claim: Any) -> bool:
        """Whether something follows from the facts for certain, and quickly."""
        claim = z3.simplify(claim)
        if z3.is_true(claim):
            return True
        if (key := claim.get_id()) not in self._known:
            solver = z3.SimpleSolver()
            solver.set("timeout", IN_RANGE_MS)
            solver.add(*self.facts, z3.Not(claim))
            self._known[key] = claim, solver.check() == z3.unsat
        return self._known[key][1]


def number(value: int | float | bool) -> Any:
    """A literal. A real one stands for the simplest fraction that rounds to it: `x / 20` and `0.05 * x` are equal."""
    if isinstance(value, bool):
        return z3.BoolVal(value)
    if isinstance(value, int):
        return z3.IntVal(value)
    exact = Fraction(value)
    short = exact.limit_denominator(SHORT)
    found = short if abs(short - exact) <= abs(exact) * ROUNDING else exact
    return z3.Q(found.numerator, found.denominator)


# A term is a graph, and as text a tree: what is shown of it is its top.
z3.set_option(max_depth=12, max_visited=400)


def shown(term: Any) -> str:
    """A term on one line."""
    return " ".join(str(term).split())
