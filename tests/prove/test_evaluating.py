"""Counterexamples of z3 count only with the functions as they are."""

from __future__ import annotations

import z3

from kgen.prove.functions import apply
from kgen.prove.obligations import Obligation, Verdict, decide
from kgen.prove.trees import number
from kgen.prove.world import World

X = z3.Real("x")


def equal(a: object, b: object) -> Verdict:
    return decide(Obligation("forward", "score", equal=(a, b)), 5.0).verdict


def test_an_odd_function_is_no_counterexample() -> None:
    world = World({})
    a, b = (apply(world, "tanh", (x,)) for x in (X, -X))
    assert equal(a, -b) is Verdict.UNKNOWN
    assert equal(a, b) is Verdict.REFUTED


def test_literals_that_are_rounded_are_equal() -> None:
    world = World({})
    assert (
        equal(apply(world, "tanh", (X / 50,)), apply(world, "tanh", (X * number(0.02),)))
        is Verdict.PROVED
    )
    root = apply(world, "sqrt", (number(0.625),))
    assert equal(X * root, X * number(0.7905694150420949)) is Verdict.PROVED
    assert equal(X * root, X * number(0.79)) is Verdict.REFUTED


def test_bits_have_one_order_and_are_integers() -> None:
    world, (a, b) = World({}), z3.Ints("a b")
    for fn in ("bitand", "bitor", "bitxor"):
        assert apply(world, fn, (a, b)).eq(apply(world, fn, (b, a)))
    claim = apply(world, "bitxor", (a, b)) == a + b
    assert (
        decide(Obligation("forward", "mask", claim, [a == 5, b == 3]), 5.0).verdict
        is not Verdict.PROVED
    )
    inverted = apply(world, "invert", (a,)) == -a - 1
    assert decide(Obligation("forward", "mask", inverted), 5.0).verdict is Verdict.PROVED
