"""Evaluate z3 terms at numbers, with the real functions of the function table.

z3 knows only that `tanh` of equal arguments is equal. Its counterexample may need a function other
than `tanh`. So a counterexample counts only if it holds with the real functions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import z3

from kgen.expr.algebra import LOG2E
from kgen.expr.functions import TABLE
from kgen.prove.world import of_table

DIFFERENT = 1e-6
"""Relative difference above which two reals differ. It is relative to the largest intermediate
value.
"""

_Number = int | float | bool


class NoValueError(Exception):
    """A term has no value at a point: a zero divisor, a logarithm of zero, an overflow."""


@dataclass
class Point:
    """Values of unknowns from a z3 model. With `seed`, reals are random instead."""

    model: Any
    seed: int | None = None
    largest: float = 1.0
    """The largest real number computed so far."""
    _done: dict[int, tuple[Any, _Number]] = field(default_factory=dict)

    def value(self, term: Any) -> _Number:
        """Return the value of a term. Raise `NoValueError` if it has none."""
        try:
            return self._value(term)
        except (ArithmeticError, ValueError) as error:
            raise NoValueError(str(error)) from None

    def _value(self, term: Any) -> _Number:
        key = term.get_id()
        if key not in self._done:
            found = self._computed(term)
            if isinstance(found, float):
                if not math.isfinite(found):
                    raise OverflowError("infinite")
                self.largest = max(self.largest, abs(found))
            # Keep the term, because z3 reuses the ids of deleted terms.
            self._done[key] = term, found
        return self._done[key][1]

    def _computed(self, term: Any) -> _Number:
        kind = term.decl().kind()
        if kind == z3.Z3_OP_ITE:
            test, then, other = term.children()
            return self._value(then if self._value(test) else other)
        if kind == z3.Z3_OP_AND:
            return all(self._value(part) for part in term.children())
        if kind == z3.Z3_OP_OR:
            return any(self._value(part) for part in term.children())
        if kind == z3.Z3_OP_IMPLIES:
            return not self._value(term.arg(0)) or bool(self._value(term.arg(1)))
        args = [self._value(part) for part in term.children()]
        if kind == z3.Z3_OP_UNINTERPRETED:
            return self._unknown(term, args)
        if kind in _OPERATIONS:
            return _OPERATIONS[kind](*args)
        return _literal(term)

    def _unknown(self, term: Any, args: Sequence[_Number]) -> _Number:
        name = term.decl().name()
        if (fn := of_table(name)) is not None:
            return _of_table(fn, args)
        if z3.is_real(term) and name == LOG2E.name:
            return math.log2(math.e)
        if z3.is_real(term) and self.seed is not None:
            rng = random.Random(f"{self.seed} {name} {args}")
            return rng.uniform(0.1, 1.0) if name == "scale" else rng.gauss(0.0, 2.0)
        at = [z3.IntVal(int(a)) for a in args]
        return _literal(self.model.eval(term.decl()(*at), model_completion=True))


def refutes(model: Any, facts: Sequence[Any], claim: Any) -> bool:
    """True if the facts hold in a model and the claim does not, with the real functions."""
    point = Point(model)
    try:
        return all(point.value(fact) for fact in facts) and not point.value(claim)
    except NoValueError:
        return False


def apart(model: Any, facts: Sequence[Any], a: Any, b: Any, seeds: int = 6) -> bool:
    """True if two reals differ for the integers of a model and some choice of reals."""
    return any(_differ(Point(model, seed), facts, a, b) for seed in (None, *range(seeds)))


def _differ(point: Point, facts: Sequence[Any], a: Any, b: Any) -> bool:
    try:
        if not all(point.value(fact) for fact in facts):
            return False
        point.largest = 1e-30
        difference = abs(point.value(a) - point.value(b))
    except NoValueError:
        return False
    return difference > DIFFERENT * point.largest


def _literal(term: Any) -> _Number:
    if z3.is_true(term) or z3.is_false(term):
        return bool(z3.is_true(term))
    if z3.is_int_value(term):
        return int(term.as_long())
    if z3.is_algebraic_value(term):
        term = term.approx(20)
    if z3.is_rational_value(term):
        return float(Fraction(term.numerator_as_long(), term.denominator_as_long()))
    raise ValueError(str(term))


def _of_table(fn: str, args: Sequence[_Number]) -> _Number:
    found = TABLE[fn].value(*args)
    if isinstance(found, complex):
        raise ValueError("a complex number")
    return found  # type: ignore[no-any-return]


def _quotient(a: int, b: int) -> int:
    """Return the quotient as z3 defines it: the remainder is not negative, for divisors of either
    sign.
    """
    return a // b if b > 0 else -(a // -b)


def _sum(*args: _Number) -> _Number:
    return sum(args)


_OPERATIONS: Mapping[int, Callable[..., _Number]] = {
    z3.Z3_OP_NOT: lambda a: not a,
    z3.Z3_OP_EQ: lambda a, b: a == b,
    z3.Z3_OP_DISTINCT: lambda *a: len({*a}) == len(a),
    z3.Z3_OP_XOR: lambda a, b: bool(a) != bool(b),
    z3.Z3_OP_LE: lambda a, b: a <= b,
    z3.Z3_OP_LT: lambda a, b: a < b,
    z3.Z3_OP_GE: lambda a, b: a >= b,
    z3.Z3_OP_GT: lambda a, b: a > b,
    z3.Z3_OP_ADD: _sum,
    z3.Z3_OP_SUB: lambda a, *b: a - sum(b),
    z3.Z3_OP_MUL: lambda *a: math.prod(a),
    z3.Z3_OP_UMINUS: lambda a: -a,
    z3.Z3_OP_DIV: lambda a, b: a / b,
    z3.Z3_OP_IDIV: _quotient,
    z3.Z3_OP_MOD: lambda a, b: a % abs(b),
    z3.Z3_OP_POWER: lambda a, b: a**b,
    z3.Z3_OP_TO_REAL: float,
    z3.Z3_OP_TO_INT: lambda a: math.floor(a),
}
