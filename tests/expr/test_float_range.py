"""Rewritten expressions stay in the range of fp32 where the written one does, and are as exact."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.specs.trees import FLOAT, INT, POSITIVE, bounded, score, words
from test_hoist import FORWARD, in_full

from kgen.expr.algebra import LOG2E, Algebra, call
from kgen.expr.differentiate import chain_rule, differentiate
from kgen.expr.float_range import stays_in_range
from kgen.expr.hoist import TILE, Program, hoist
from kgen.expr.index_ranges import IndexRanges
from kgen.expr.nodes import Const, Node, Var, reads, walk
from kgen.expr.softmax_form import SCORE, peel_scalar, softmax_form
from kgen.expr.text_checks import ExpressionError
from kgen.targets.triton.printer import BufferLayout, Printer
from kgen.verify.evaluate import evaluate

SMALLEST, GREATEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
N = 48
LAYOUTS = {"columns": BufferLayout("fp32", ("SK",)), "slopes": BufferLayout("fp32", ("HQ",))}


def points() -> dict[str, Any]:
    """Scores of many magnitudes, with a position for each."""
    make = torch.Generator().manual_seed(0)
    scores = torch.logspace(-4, 4, N, dtype=torch.float64) * (torch.arange(N) % 3 - 1).where(
        torch.arange(N) % 3 != 1, torch.ones(N)
    )
    scores = scores.float().double()
    reals = torch.randn(N, generator=make).double()
    env = {
        "score": scores,
        "qk": 8 * scores,
        "scale": 0.125,
        "LOG2E": 1.4426950408889634,
        "kv_idx": torch.arange(N),
    }
    return env | {
        "columns": reals,
        "slopes": reals[:2],
        "h": 1,
        "cap": 30.0,
        "gain": -0.75,
        "q_idx": 5,
        "q_start": 0,
    }


ENV = points()


def at(node: Node, real: torch.dtype) -> torch.Tensor:
    return evaluate(node, ENV, torch, real).to(real).expand(N)


def clean(node: Node) -> torch.Tensor:
    """True where each intermediate is zero, or well within the normal numbers of fp32."""
    good = torch.ones(N, dtype=torch.bool)
    for part in set(walk(node)):
        size = at(part, torch.float64).abs()
        if part.type is INT:
            good &= size < 2**31
        if part.type is FLOAT:
            good &= (size == 0) | ((size >= 2**10 * SMALLEST) & (size <= GREATEST / 2**10))
    return good


def autograd(node: Node, real: torch.dtype) -> torch.Tensor:
    """Return the derivative of the written expression by the score."""
    leaf = ENV["score"].to(real).requires_grad_()
    value = evaluate(node, ENV | {"score": leaf}, torch, real).expand(N)
    return (
        torch.autograd.grad(value.sum(), leaf)[0]
        if value.requires_grad
        else torch.zeros(N, dtype=real)
    )


def greatest(node: Node) -> torch.Tensor:
    """Return the largest magnitude of an intermediate."""
    return torch.stack([at(part, torch.float64).abs() for part in set(walk(node))]).amax(0)


def as_good(
    got: Node, written: Node, single: torch.Tensor, want: torch.Tensor, where: torch.Tensor
) -> None:
    """Check that the fp32 result is as exact as `single`, the fp32 result of the written
    expression.

    It must also be finite where `single` is finite.
    """
    where = where & single.isfinite() & ((want == 0) | ((want.abs() > 1e-30) & (want.abs() < 1e30)))
    value = at(got, torch.float32)
    assert value[where].isfinite().all(), (value[where], want[where])
    error, allowed = (value.double() - want).abs(), (single.double() - want).abs()
    bad = where & (error > 64 * allowed + 1e-4 * want.abs() + 4e-6 * greatest(written))
    assert not bad.any(), (value[bad], want[bad], ENV["score"][bad])


def check_text(program: Program) -> None:
    """Check that printed constants fit in fp32, and integers in 32 bits."""
    printer = Printer(
        program,
        "q",
        LAYOUTS,
        IndexRanges({}, frozenset({"SK", "HQ"})),
        frozenset({"cap"}),
        accuracy="usual",
    )
    nodes = [*(b.node for b in program.bindings), *program.results.values()]
    for node in nodes:
        for number in re.findall(r"(?<![\w.])\d[\d.]*(?:e[+-]?\d+)?", str(printer.own(node))):
            assert float(number) == 0 or SMALLEST <= float(number) <= GREATEST, number
            assert "." in number or "e" in number or int(number) < 2**31, number


def check(text: str) -> None:
    tree, algebra = score(text), Algebra(POSITIVE)
    good = clean(tree)
    form = softmax_form(tree, algebra)
    roots = {"core": (form.core, TILE), "qk_scale": (form.multiplier, TILE)}
    if form.bias is not None:
        roots["bias"] = (form.bias, TILE)
    slope, rest = peel_scalar(differentiate(tree, SCORE, algebra), algebra)
    roots |= {"slope": (slope, TILE), "dscore": (rest, TILE)}
    program = hoist(roots, FORWARD)
    check_text(program)

    full = {name: in_full(node, program) for name, node in program.results.items()}
    whole: Node = call("mul", full["qk_scale"], full["core"])
    for term in (full.get("bias"), form.row_rest and call("mul", LOG2E, form.row_rest)):
        whole = whole if term is None else call("add", whole, term)
    written = call("mul", LOG2E, tree)
    single, double = at(written, torch.float32), at(written, torch.float64)
    as_good(whole, written, single, double, good & clean(written))

    slope_tree, rule = call("mul", full["slope"], full["dscore"]), chain_rule(tree, SCORE)
    as_good(slope_tree, rule, autograd(tree, torch.float32), autograd(tree, torch.float64), good)


NUMBERS = words(
    "0.1 0.123456789 1.7 20.5 0.001 3.3 2 7 0.7978845608 1e6 1e-7 1e12 1e-13 2.5e-20 3e20 3"
)
OFFSETS = words("0.1 1.7 20.5 0.001 2 1e6 3e20 1e12")
LEAVES = st.sampled_from(
    [*words("score score score score cap gain columns[kv_idx] slopes[h]"), *NUMBERS]
)


def larger(part: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    numbers, offsets = st.sampled_from(NUMBERS), st.sampled_from(OFFSETS)
    return st.one_of(
        st.builds("({} + {})".format, part, part),
        st.builds("({} - {})".format, part, numbers),
        st.builds("({} * {})".format, part, part),
        st.builds("({} / {})".format, part, numbers),
        st.builds("({} / ({} + abs({})))".format, part, offsets, part),
        st.builds("({} / ({} + ({}) ** 2))".format, part, offsets, part),
        st.builds("(({}) ** {})".format, part, st.integers(2, 8)),
        st.builds("log2({} + ({}) ** 2)".format, offsets, part),
        st.builds("cap * tanh({} / cap)".format, part),
        st.builds("tanh({})".format, part),
        st.builds("sigmoid({})".format, part),
        st.builds("rsqrt({} + abs({}))".format, offsets, part),
        st.builds("abs({})".format, part),
        st.builds("where(score > {}, {}, {})".format, numbers, part, part),
        st.builds("max({}, {})".format, part, part),
    )


VALUES_OF_SCORE = st.deferred(lambda: larger(LEAVES | larger(LEAVES | larger(LEAVES))))


def is_small(text: str) -> bool:
    """True for an expression of few terms. Nested powers are refused, or too slow for this test."""
    try:
        return sum(1 for _ in walk(score(text))) < 150
    except ExpressionError:
        return False


@settings(bounded, max_examples=200)
@given(VALUES_OF_SCORE)
def test_random_expressions(text: str) -> None:
    assume(is_small(text))
    check(text)


@pytest.mark.parametrize(
    "text",
    [
        "log2(2 + (score + 0.5)**2)",
        "20.5 * score / (20.5 + abs(score) * 1.7 + (score * 0.123456789 + 0.1)**2)",
        "0.1 * score / (0.3 + 0.7 * score**2) / (1.1 + 0.9 * score**2)",
        "1 / (1 / score + 1 / cap)",
        "(score / 3.3)**8",
        "(score / cap)**8",
        "(score / 1e10)**4",
        "(score * 1e-10)**4",
        "(score / 1e4)**8 * 30",
        "(score / 3e8)**4 / (1 + (score / 3e8)**4)",
        "score**8 / (1 + score**8)",
        "score**4 / (1 + score**4) / (2.5 + score**4)",
        "score * 1e38 / 1e37 * 1e38 / 1e38",
        "score * 1e-30 * (score * 1e-30 + 1) * 1e30",
        "score + 0.123456789 * kv_idx - 0.1 * q_idx + 0.3 * columns[kv_idx]",
        "gain * (score * 0.333333333 + cap * tanh(0.123456789 * score + 0.1) / 0.7)",
    ],
)
def test_what_algebra_would_take_out_of_range(text: str) -> None:
    check(text)


def test_squares_of_distances_are_not_multiplied_out() -> None:
    """Near position one million, fp32 cannot represent the difference of the squares."""
    for text in (
        "score - 0.001 * (kv_idx - q_idx)**2",
        "score + slopes[h] * (kv_idx - q_idx)**2 - 0.5 * q_idx",
    ):
        form = softmax_form(score(text), Algebra())
        assert form.bias is not None
        far = {"q_idx": 40_000, "q_start": 39_936, "kv_idx": torch.tensor([40_001]), "h": 0}
        env = ENV | far | {"slopes": torch.tensor([-0.001])}
        value = [evaluate(form.bias, env, torch, real) for real in (torch.float32, torch.float64)]
        torch.testing.assert_close(value[0].double(), value[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rewritten", "written", "stays"),
    [
        ("score * score", "score ** 2", True),
        ("score ** 8 * 1e-38 * 1e-10", "(score / 1e6) ** 8", False),
        ("1e-30 * gain", "gain * (1e-20 * 1e-10)", True),
        ("gain * 1e-40", "gain * 1e-20 * 1e-20", False),
        ("score ** 8 / cap ** 8", "(score / cap) ** 8", False),
        ("kv_idx * kv_idx - 2 * kv_idx * q_idx + q_idx * q_idx", "(kv_idx - q_idx) ** 2", False),
        ("where(score > 0, score, -inf)", "where(score > 0, score, -inf)", True),
    ],
)
def test_ranges(rewritten: str, written: str, stays: bool) -> None:
    assert stays_in_range(score(rewritten), score(written)) is stays


@pytest.mark.parametrize("number", range(10))
def test_names_do_not_decide(number: int) -> None:
    """Two specs that differ in the words for their parameters use the same form."""
    y, slope, gain, cap = (Var(f"{letter}{number}", FLOAT) for letter in "abcd")
    capped = call("tanh", call("div", call("mul", y, slope), cap))
    steepness = call("sub", Const(1, INT), call("mul", capped, capped))
    written = call("mul", gain, call("mul", steepness, call("div", y, cap)))
    rewritten = call("div", call("mul", call("mul", y, gain), steepness), cap)
    assert stays_in_range(rewritten, call("add", written, call("mul", gain, capped)))


@settings(bounded, max_examples=100)
@given(VALUES_OF_SCORE)
def test_the_chain_rule_alone(text: str) -> None:
    """The chain rule gives the same derivative as autograd."""
    assume(is_small(text))
    tree = score(text)
    good = clean(tree)
    rule = chain_rule(tree, SCORE)
    as_good(rule, rule, autograd(tree, torch.float32), autograd(tree, torch.float64), good)
    for read in reads(tree):
        assert not isinstance(chain_rule(tree, read), Const) or read.buffer not in text


def test_numbers_stay_those_that_were_written() -> None:
    """A common denominator would have integers of many digits."""
    form = softmax_form(
        score("20.5 * score / (20.5 + abs(score) * 1.7 + (score * 0.123456789 + 0.1)**2)"),
        Algebra(),
    )
    numbers = {node.value for node in walk(form.core) if isinstance(node, Const)}
    assert numbers == {0.123456789, 0.1, 1.7, 20.5}
    form = softmax_form(score("score + 0.123456789 * kv_idx - 0.1 * q_idx"), Algebra())
    assert form.bias is not None
    assert {n.value for n in walk(form.bias) if isinstance(n, Const)} == {0.123456789, 0.1}
