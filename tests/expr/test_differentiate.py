"""Derivatives of score_mod against autograd of the tree that the user wrote."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.specs.trees import FLOAT, POSITIVE, bounded, evaluate, score
from test_softmax_form import SK, SQ, points, score_mods

from kgen.expr.algebra import Algebra
from kgen.expr.differentiate import differentiate, is_one, is_zero
from kgen.expr.nodes import Node, Read, Var, reads, substitute, variables
from kgen.expr.softmax_form import SCORE, peel_scalar


def autograd(tree: Node, wrt: Var | Read, env: dict[str, Any]) -> torch.Tensor:
    """Return the derivative at every pair of positions; a read becomes a variable."""
    value = evaluate(wrt, env).expand(SQ, SK).clone().requires_grad_()
    name = wrt.name if isinstance(wrt, Var) else "this_read"
    put = tree if isinstance(wrt, Var) else substitute(tree, {wrt: Var(name, FLOAT)})
    result = evaluate(put, env | {name: value}).expand(SQ, SK).double()
    if not result.requires_grad:
        return torch.zeros(SQ, SK, dtype=torch.float64)
    (grad,) = torch.autograd.grad(result.sum(), value, allow_unused=True)
    return torch.zeros_like(value) if grad is None else grad


def check(text: str, seed: int) -> None:
    tree, env, algebra = score(text), points(seed), Algebra(POSITIVE)
    for wrt in (SCORE, *(r for r in reads(tree) if r.type is FLOAT)):
        derivative = differentiate(tree, wrt, algebra)
        assert "score" not in variables(derivative)
        got = evaluate(derivative, env).double().expand(SQ, SK)
        want = autograd(tree, wrt, env)
        assert torch.allclose(got, want, rtol=1e-9, atol=1e-9), f"d / d {wrt}"
        # The factor is applied once, the rest for each element.
        factor, rest = peel_scalar(derivative, algebra)
        assert not variables(factor) & {"q_idx", "kv_idx", "qk", "q_start"}
        product = evaluate(factor, env).double() * evaluate(rest, env).double()
        assert torch.allclose(product.expand(SQ, SK), want, rtol=1e-9, atol=1e-9), (
            f"peeled d / d {wrt}"
        )


@settings(bounded, max_examples=150)
@given(score_mods(), st.integers(0, 7))
def test_against_autograd(text: str, seed: int) -> None:
    check(text, seed)


@pytest.mark.parametrize(
    "text",
    [
        "score * slopes[h] + slopes[0] * slopes[h]",
        "score + rows[q_idx] * rows[0] - rows[q_idx] * rows[q_idx]",
        "tanh(bias[h, q_idx, kv_idx] + bias[0, q_idx, kv_idx] * score)",
        "where(columns[kv_idx] > 0, columns[kv_idx] * score, rows[q_idx])",
        "max(score, columns[kv_idx]) + min(rows[q_idx], score * score)",
        "sigmoid(score) * exp(-abs(columns[kv_idx]))",
        "sqrt(1.0 + score * score) + rsqrt(2.0 + slopes[h] * slopes[h])",
        "log(2.0 + abs(score)) + log2(1.5 + rows[q_idx] * rows[q_idx])",
        "sin(score * columns[kv_idx]) + cos(slopes[h])",
        "clamp(score * gain, -cap, columns[kv_idx])",
        "score ** 3 / (1.0 + columns[kv_idx] ** 2)",
        "floor(score) * score",
        "exp2(columns[kv_idx]) / (score * score + 1.0)",
    ],
)
def test_each_function(text: str) -> None:
    for seed in range(3):
        check(text, seed)


def test_repeated_reads_of_one_buffer_are_distinct() -> None:
    tree, algebra = score("score + slopes[h] * slopes[0]"), Algebra()
    at_head, at_zero = reads(tree)
    assert differentiate(tree, at_head, algebra) == at_zero
    assert differentiate(tree, at_zero, algebra) == at_head


def test_constants_are_recognised() -> None:
    assert is_one(differentiate(score("score + bias[h, q_idx, kv_idx]"), SCORE, Algebra()))
    assert is_zero(differentiate(score("columns[kv_idx]"), SCORE, Algebra()))
    assert is_zero(differentiate(score("floor(score)"), SCORE, Algebra()))


def test_an_infinite_branch_does_not_make_the_other_nan() -> None:
    """With a product of condition and value, the unselected branch would be 0 * inf."""
    tree, env = score("where(kv_idx < 3, score, -inf)"), points(0)
    got = evaluate(differentiate(tree, SCORE, Algebra()), env).double().expand(SQ, SK)
    assert torch.equal(got, (env["kv_idx"] < 3).double().expand(SQ, SK))
