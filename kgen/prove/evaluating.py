"""Terms of z3 at numbers, with the functions of the table as they are.

z3 knows of `tanh` that equal arguments give equal values, and nothing else. Its counterexample may need another `tanh`
than there is, so it counts only if it still is one here.
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
"""Two reals differ if they do by more than this, relative to the largest number that they are made of."""

_Number = int | float | bool


class NoValueError(Exception):
    """A term has no value at a point: a zero divisor, a logarithm of zero, an overflow."""


@dataclass
class Point:
    """The numbers that a model of z3 gives to unknowns. With `seed`, reals are random instead."""

    model: Any
    seed: int | None = None
    largest: float = 1.0
    """The largest real number met so far."""
    _done: dict[int, tuple[Any, _Number]] = field(default_factory=dict)

    def value(self, term: Any) -> _Number:
        """The value of a term. Raises `NoValueError`."""
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
            # The term is kept: its number is free for another one once it is gone.
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
    """True if the facts hold in a model, and the claim does not, with functions as they are."""
    point = Point(model)
    try:
        return all(point.value(fact) for fact in facts) and not point.value(claim)
    except NoValueError:
        return False


def apart(model: Any, facts: Sequence[Any], a: Any, b: Any, seeds: int = 6) -> bool:
    """True if two reals differ where the integers are those of a model, and the reals are any."""
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
    """z3's quotient: what is left is not negative, whatever the sign of the divisor."""
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
