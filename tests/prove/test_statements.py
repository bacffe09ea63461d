"""Statements of kernels as terms: loads, guards, widths, searches, and statements without a
meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import z3

from kgen.prove.functions import Beyond
from kgen.prove.obligations import Decision, Obligation, Verdict, decide
from kgen.prove.statements import Machine, values_of
from kgen.prove.world import Buffer, World
from kgen.targets.code import Assign, If, Name, Repeat, assign, cdiv, load, op, over, row
from kgen.targets.triton.printer import first_at_least


def machine(ascends: bool = False, **more: Any) -> Machine:
    world = World({"x": Buffer(("B", "SQ"), "int32", ascends)})
    b, q = world.integer("b", 0), world.integer("q_idx", 0)
    world.facts.append(b < world.length("B"))
    return Machine(world, values_of({"b": b, "q_idx": q, "SQ": world.length("SQ"), **more}))


def decided(of: Machine, claim: Any, facts: Sequence[Any] = ()) -> Decision:
    return decide(
        Obligation("kernel", "claim", claim, [*of.world.facts, *facts], of.world.shown), 5.0
    )


ADDRESS = row(
    "add", row("add", "x_ptr", row("mul", "b", "stride_x_0")), row("mul", "q_idx", "stride_x_1")
)


def of_load(*guard: Any) -> Decision:
    one = machine().run([assign("v", load(ADDRESS, *guard))])
    (found,) = one.loads
    assert found.inside is not None
    return decided(one, z3.Implies(found.when, found.inside))


def test_a_load_is_inside_behind_its_guard() -> None:
    assert of_load(row("lt", "q_idx", "SQ")).verdict is Verdict.PROVED


@pytest.mark.parametrize("guard", [(), (row("le", "q_idx", "SQ"),), (row("lt", "b", "SQ"),)])
def test_a_load_that_may_be_outside_is_refuted(guard: tuple[Any, ...]) -> None:
    found = of_load(*guard)
    assert found.verdict is Verdict.REFUTED
    assert int(found.counterexample["q_idx"]) >= int(found.counterexample["SQ"])


def test_an_address_of_another_buffer_is_beyond() -> None:
    one = machine().run([assign("v", load(row("add", "x_ptr", row("mul", "b", "stride_y_0"))))])
    assert one.loads[0].inside is None
    assert "stride_y_0" in one.loads[0].why
    with pytest.raises(Beyond, match="stride_y_0"):
        one.value(Name("v"))


def test_what_is_beyond_is_so_for_what_uses_it() -> None:
    one = machine().run([assign("v", op("mystery({0})", "b")), assign("w", row("add", "v", "b"))])
    with pytest.raises(Beyond, match="mystery"):
        one.value(Name("w"))


def test_a_name_that_a_loop_assigns_is_beyond() -> None:
    loop = Repeat(Name("q_idx"), (assign("v", row("add", "v", "b")),))
    one = machine().run([assign("v", "b"), loop])
    with pytest.raises(Beyond, match="loop"):
        one.value(Name("v"))


def test_integers_are_kept_with_the_condition_of_their_branch() -> None:
    lines = [
        If(
            row("lt", "q_idx", "100"),
            (assign("n", row("mul", "q_idx", "q_idx")),),
            (assign("n", "0"),),
        )
    ]
    one = machine().run(lines)
    (found,) = one.computed
    assert decided(one, z3.Implies(found.when, found.term < 10_000)).verdict is Verdict.PROVED
    assert decided(one, found.term < 10_000).verdict is Verdict.REFUTED
    assert decided(one, one.value(Name("n")) < 10_000).verdict is Verdict.PROVED


def test_rounding_up_is_an_addition_that_may_overflow() -> None:
    one = machine().run([assign("n", cdiv("q_idx", "64"))])
    assert decided(one, one.computed[0].term < 2**31).verdict is Verdict.REFUTED


def test_quotients_are_those_of_triton() -> None:
    one = machine(low=z3.IntVal(-1)).run([assign("n", over("low", 64))])
    assert decided(one, one.value(Name("n")) == 0).verdict is Verdict.PROVED


def search(ascends: bool) -> Decision:
    """Decide that a search ends at or before each element that is large enough."""
    at = row("add", "x_ptr", row("mul", "b", "stride_x_0"))
    one = machine(ascends, a=z3.Int("a"))
    one.run(
        [Assign(("first", "_"), (first_at_least(at, "stride_x_1", "SQ", Name("a"), Name("a")),))]
    )
    element = one.world.read("x", (one.value(Name("b")), one.value(Name("q_idx"))))
    there = one.value(row("lt", "q_idx", "SQ"))
    claim = z3.Implies(element >= z3.Int("a"), one.value(Name("first")) <= one.value(Name("q_idx")))
    return decided(one, claim, [there])


def test_a_search_of_what_ascends() -> None:
    assert search(ascends=True).verdict is Verdict.PROVED


def test_a_search_of_what_does_not_ascend_is_refuted() -> None:
    assert search(ascends=False).verdict is Verdict.REFUTED


def test_equal_polynomials_by_cases() -> None:
    x, y, c = z3.Real("x"), z3.Real("y"), z3.Bool("c")
    left, right = (x + y) * z3.If(c, x, y), z3.If(c, x * x + x * y, y * y + y * x)
    assert decide(Obligation("k", "w", equal=(left, right)), 5.0).verdict is Verdict.PROVED
    wrong = decide(Obligation("k", "w", equal=(left, right + 1)), 5.0)
    assert wrong.verdict is Verdict.REFUTED


def test_quotients_by_what_may_be_zero_are_products() -> None:
    x, y, n = z3.Real("x"), z3.Real("y"), z3.Int("n")
    left, right = (
        x * (y / z3.ToReal(n)) / (x / y + 1),
        ((x * y) / z3.ToReal(n + 1 - 1)) / (1 + x / y),
    )
    assert decide(Obligation("k", "w", equal=(left, right)), 5.0).verdict is Verdict.PROVED
    wrong = Obligation("k", "w", equal=(x / z3.ToReal(n), x / z3.ToReal(n + 1)))
    assert decide(wrong, 5.0).verdict is Verdict.REFUTED


def test_what_takes_too_long_is_unknown_by_its_term() -> None:
    x, y, z = z3.Ints("x y z")
    hard = Obligation("k", "w", z3.Not(x**3 + y**3 + z**3 == 114), [x != 0])
    found = decide(hard, 0.05)
    assert found.verdict is Verdict.UNKNOWN
    assert "114" in found.why
