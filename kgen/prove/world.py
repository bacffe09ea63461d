"""The unknowns of a proof: sizes and params are integers, and buffers are functions.

A buffer that the spec declares sorted ascends. The world states this for each pair of elements that
an obligation names, so no formula needs a quantifier.
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
"""Maximum of sizes."""
MOST = 2**30
"""Maximum magnitude of run-time params and of elements of int32 buffers."""
MOST_WIDE = 2**62
"""Maximum magnitude of elements of int64 buffers."""

SHORT = 2**20
"""Maximum denominator of a fraction that replaces a literal."""
ROUNDING = Fraction(1, 2**48)
"""Maximum relative distance of a literal from its fraction: a few roundings of float64."""

IN_RANGE_MS = 500


_OF_TABLE = "()"
"""Suffix of names of table functions, because a buffer may have the same name."""


def of_table(name: str) -> str | None:
    """Return the name in the function table of a z3 function; None for a buffer."""
    return name.removesuffix(_OF_TABLE) if name.endswith(_OF_TABLE) else None


@dataclass(frozen=True, eq=False)
class Place:
    """An element of a buffer.

    Its name is built only when it is printed, because printing terms is slow.
    """

    buffer: str
    indices: tuple[Any, ...]

    def __str__(self) -> str:
        return (
            f"{self.buffer}[{', '.join(map(shown, self.indices))}]" if self.indices else self.buffer
        )


@dataclass(frozen=True)
class Buffer:
    """A declared buffer, whose sizes are numbers or names."""

    shape: tuple[int | str, ...]
    dtype: str
    ascends: bool
    within: int | None = None
    """Maximum magnitude of its elements; None for the bound of its dtype."""


@dataclass
class World:
    """The unknowns of a group of obligations, and the assumptions about them (`facts`)."""

    buffers: Mapping[str, Buffer]
    facts: list[Any] = field(default_factory=list)
    shown: dict[str | Place, Any] = field(default_factory=dict)
    """Terms whose values a counterexample prints, by name."""
    _quotients: list[tuple[Any, Any, Any]] = field(default_factory=list)
    _functions: dict[str, Any] = field(default_factory=dict)
    _elements: dict[str, dict[tuple[int, ...], tuple[Any, ...]]] = field(default_factory=dict)
    _searches: dict[tuple[str | int, ...], tuple[Any, ...]] = field(default_factory=dict)
    _known: dict[int, tuple[Any, bool]] = field(default_factory=dict)

    def integer(self, name: str, low: int | None = None, high: Any = None) -> Any:
        """Return the unknown integer of a name, between two inclusive bounds."""
        found = z3.Int(name)
        if name not in self.shown:
            self.shown[name] = found
            self.facts += [] if low is None else [found >= low]
            self.facts += [] if high is None else [found <= high]
        return found

    def divides(self, whole: Any, one: Any, other: Any) -> None:
        """State that `whole` is `one * other`, so that division by one factor gives the other."""
        self.facts.append(whole == one * other)
        self._quotients += [(whole, one, other), (whole, other, one)]

    def quotient(self, a: Any, b: Any) -> Any | None:
        """Return the known value of `a // b`, or None."""
        return next((found for x, y, found in self._quotients if x.eq(a) and y.eq(b)), None)

    def length(self, size: int | str) -> Any:
        """Return a size of a buffer."""
        if isinstance(size, int):
            return z3.IntVal(size)
        return self.integer(show(Var(size, Type.INT)), 0, LONGEST)

    def function(self, name: str, *sorts: Any) -> Any:
        """Return the uninterpreted function of a name."""
        if name not in self._functions:
            self._functions[name] = z3.Function(name, *sorts)
        return self._functions[name]

    def of_row(self, fn: str, sort: Any, args: Sequence[Any]) -> Any:
        """Apply a function of the table as an uninterpreted function."""
        return self.function(f"{fn}{_OF_TABLE}", *(a.sort() for a in args), sort)(*args)

    def inside(self, buffer: str, indices: tuple[Any, ...]) -> Any:
        """State that the indices are in bounds."""
        sizes = self.buffers[buffer].shape
        parts = [z3.And(i >= 0, i < self.length(s)) for i, s in zip(indices, sizes, strict=True)]
        return z3.And(*parts) if parts else z3.BoolVal(True)

    def read(self, buffer: str, indices: tuple[Any, ...]) -> Any:
        """Return an element as a spec defines it: zero if an index is out of bounds."""
        element, inside = self.element(buffer, indices), self.inside(buffer, indices)
        if self.holds(inside):
            return element
        zero = z3.RealVal(0) if element.sort() == z3.RealSort() else z3.IntVal(0)
        return z3.If(inside, element, zero)

    def element(self, buffer: str, indices: tuple[Any, ...]) -> Any:
        """Return an element whose indices are in bounds."""
        of = self.buffers[buffer]
        real = of.dtype in ("fp32", "bf16", "fp16", "any")
        sort = z3.RealSort() if real else z3.IntSort()
        indices = tuple(z3.simplify(i) for i in indices)
        # In z3, a function without arguments is a constant.
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
        """Return the first position in a sorted row with an element of at least `value`.

        It is the length of the row if no element is.
        """
        value, row = z3.simplify(value), tuple(z3.simplify(i) for i in row)
        key = (buffer, *(i.get_id() for i in (*row, value)))
        if key in self._searches:
            return self._searches[key][0]
        size = self.length(self.buffers[buffer].shape[-1])
        found = self.integer(f"{buffer} from {len(self._searches)}", 0)
        # Keep the terms, because z3 reuses the ids of deleted terms.
        self._searches[key] = (found, value, *row)
        self.facts.append(found <= size)
        before, at = self.element(buffer, (*row, found - 1)), self.element(buffer, (*row, found))
        self.facts += [z3.Implies(found > 0, before < value), z3.Implies(found < size, at >= value)]
        return found

    def holds(self, claim: Any) -> bool:
        """True if z3 proves quickly that a claim follows from the facts."""
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
    """Return a literal.

    A real becomes the simplest fraction that rounds to it, so `x / 20` equals `0.05 * x`.
    """
    if isinstance(value, bool):
        return z3.BoolVal(value)
    if isinstance(value, int):
        return z3.IntVal(value)
    exact = Fraction(value)
    short = exact.limit_denominator(SHORT)
    found = short if abs(short - exact) <= abs(exact) * ROUNDING else exact
    return z3.Q(found.numerator, found.denominator)


# A term is a graph, and its text is a tree, which can be much larger. So only the top is printed.
z3.set_option(max_depth=12, max_visited=400)


def shown(term: Any) -> str:
    """Return a term as text on one line."""
    return " ".join(str(term).split())
