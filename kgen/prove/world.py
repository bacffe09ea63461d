"""What a proof knows: sizes and params as unknown integers, buffers as functions that nothing is known of.

A buffer that the spec declares sorted ascends: that is stated for every two of its elements that an obligation names,
so that no formula has a quantifier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import z3

LONGEST = 2**29
"""Sizes are at most that."""
MOST = 2**30
"""Run-time params and elements of int32 buffers are at most that far from zero."""
MOST_WIDE = 2**62
"""The same of elements of int64 buffers."""

IN_RANGE_MS = 500


@dataclass(frozen=True)
class Buffer:
    """A declared buffer: its sizes are numbers or names."""

    shape: tuple[int | str, ...]
    dtype: str
    ascends: bool


@dataclass
class World:
    """The unknowns of one family of obligations, and what is taken for granted of them (`facts`)."""

    buffers: Mapping[str, Buffer]
    facts: list[Any] = field(default_factory=list)
    shown: dict[str, Any] = field(default_factory=dict)
    """What a counterexample gives the values of, by name."""
    _functions: dict[str, Any] = field(default_factory=dict)
    _elements: dict[str, dict[str, tuple[Any, ...]]] = field(default_factory=dict)
    _searches: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    _known: dict[str, bool] = field(default_factory=dict)

    def integer(self, name: str, low: int | None = None, high: Any = None) -> Any:
        """An unknown integer between two bounds, inclusive."""
        found = z3.Int(name)
        if name not in self.shown:
            self.shown[name] = found
            self.facts += [] if low is None else [found >= low]
            self.facts += [] if high is None else [found <= high]
        return found

    def length(self, size: int | str) -> Any:
        """A size of a buffer."""
        return z3.IntVal(size) if isinstance(size, int) else self.integer(size, 0, LONGEST)

    def function(self, name: str, *sorts: Any) -> Any:
        """A function of which nothing is known but its name."""
        if name not in self._functions:
            self._functions[name] = z3.Function(name, *sorts)
        return self._functions[name]

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
        key = repr([i.sexpr() for i in indices])
        if key in known:
            return found
        if not real:
            most = {"bool": 1, "int64": MOST_WIDE}.get(of.dtype, MOST)
            self.facts += [found >= (0 if of.dtype == "bool" else -most), found <= most]
        if of.ascends:
            for other in known.values():
                self._ascending(buffer, indices, other)
                self._ascending(buffer, other, indices)
        known[key] = indices
        self.shown[f"{buffer}[{', '.join(map(shown, indices))}]" if indices else buffer] = found
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
        name = f"{buffer} from {shown(value)}"
        key = repr([buffer, *[i.sexpr() for i in (*row, value)]])
        if key in self._searches:
            return self._searches[key][0]
        size = self.length(self.buffers[buffer].shape[-1])
        found = self.integer(name, 0)
        self._searches[key] = (found,)
        self.facts.append(found <= size)
        before, at = self.element(buffer, (*row, found - 1)), self.element(buffer, (*row, found))
        self.facts += [z3.Implies(found > 0, before < value), z3.Implies(found < size, at >= value)]
        return found

    def holds(self, claim: Any) -> bool:
        """Whether something follows from the facts for certain, and quickly."""
        key = claim.sexpr()
        if key not in self._known:
            solver = z3.Solver()
            solver.set("timeout", IN_RANGE_MS)
            solver.add(*self.facts, z3.Not(claim))
            self._known[key] = solver.check() == z3.unsat
        return self._known[key]


def shown(term: Any) -> str:
    """A term on one line."""
    return " ".join(str(term).split())
