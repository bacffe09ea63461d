"""Terms of z3 have the values of the operators of Python, Triton and trees."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import z3

from kgen.expr.functions import TABLE
from kgen.prove.functions import apply, toward_zero
from kgen.prove.world import World

NUMBERS = (-9, -8, -3, -1, 1, 2, 3, 8, 9)
INTEGERS = (
    "add",
    "sub",
    "mul",
    "min",
    "max",
    "floordiv",
    "mod",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
)


def number(term: Any) -> Any:
    found = z3.simplify(term)
    return found.as_long() if z3.is_int_value(found) else z3.is_true(found)


@pytest.mark.parametrize("fn", INTEGERS)
def test_integers(fn: str) -> None:
    for a, b in itertools.product(NUMBERS, NUMBERS):
        assert number(apply(World({}), fn, (z3.IntVal(a), z3.IntVal(b)))) == TABLE[fn].value(a, b)


@pytest.mark.parametrize(
    ("fn", "known"),
    [("lshift", (0, 1, 6)), ("rshift", (0, 1, 6)), ("bitand", (0, 1, 7, -1, -2, -8))],
)
def test_bits_of_integers(fn: str, known: tuple[int, ...]) -> None:
    for a, b in itertools.product((*NUMBERS, 0, 200, -200), known):
        x = z3.Int("x")
        term = z3.substitute(apply(World({}), fn, (x, z3.IntVal(b))), (x, z3.IntVal(a)))
        assert number(term) == TABLE[fn].value(a, b)


def test_other_bits_are_congruent_and_nothing_more() -> None:
    world, (x, y) = World({}), z3.Ints("x y")
    others = ("bitand", z3.IntVal(5)), ("rshift", y), ("bitor", z3.IntVal(1))
    out_of_contract = ("rshift", z3.IntVal(-1)), ("lshift", z3.IntVal(32))
    for fn, b in (*others, *out_of_contract):
        solver = z3.Solver()
        solver.add(apply(world, fn, (x + 1, b)) != apply(world, fn, (1 + x, b)))
        assert solver.check() == z3.unsat
    solver.reset()
    solver.add(
        apply(world, "rshift", (x, z3.IntVal(-1))) != apply(world, "floordiv", (x, z3.IntVal(0)))
    )
    assert solver.check() == z3.sat


@pytest.mark.parametrize("fn", ["floordiv", "mod"])
def test_divisors_that_are_not_known(fn: str) -> None:
    """The same holds if only the solver knows the divisor."""
    a, b, found = z3.Ints("a b found")
    for x, y in itertools.product(NUMBERS, NUMBERS):
        solver = z3.Solver()
        solver.add(a == x, b == y, found == apply(World({}), fn, (a, b)))
        assert solver.check() == z3.sat
        assert solver.model()[found].as_long() == TABLE[fn].value(x, y)


def test_division_of_triton_rounds_toward_zero() -> None:
    for a, b in itertools.product(NUMBERS, NUMBERS):
        assert number(toward_zero(z3.IntVal(a), z3.IntVal(b))) == int(a / b)


def test_functions_of_reals_are_congruent_and_nothing_more() -> None:
    world, x, y = World({}), z3.Real("x"), z3.Real("y")
    sum_, other = apply(world, "tanh", (x + y,)), apply(world, "tanh", (y + x,))
    solver = z3.Solver()
    solver.add(sum_ != other)
    assert solver.check() == z3.unsat
    solver.reset()
    solver.add(apply(world, "tanh", (x,)) != apply(world, "exp", (x,)))
    assert solver.check() == z3.sat
