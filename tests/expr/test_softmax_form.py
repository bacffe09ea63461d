"""The parts of the softmax form add up to the score_mod of the user."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.specs.trees import POSITIVE, bounded, draw_env, evaluate, score, words

from kgen.expr.algebra import Algebra
from kgen.expr.nodes import Const, Node, Type, reads, variables
from kgen.expr.softmax_form import QK, SoftmaxForm, softmax_form

LOG2E = 1.4426950408889634
SQ, SK, ROWS = 9, 8, 3


def form_of(text: str, exact: bool = False) -> SoftmaxForm:
    return softmax_form(score(text), Algebra(POSITIVE), exact)


def points(seed: int) -> dict[str, Any]:
    """Draw scores of all sizes for every pair of positions.

    `q_start` is the first row of a tile.
    """
    make = torch.Generator().manual_seed(seed)
    q = torch.arange(SQ)[:, None]
    qk = torch.randn((SQ, SK), generator=make, dtype=torch.float64) * torch.logspace(-2, 1.5, SK)
    env = draw_env(seed, SQ, SK) | {"b": seed % 2, "h": seed // 2 % 2, "scale": 0.3, "LOG2E": LOG2E}
    return env | {
        "q_idx": q,
        "q_start": q // ROWS * ROWS,
        "kv_idx": torch.arange(SK)[None, :],
        "qk": qk,
        "score": 0.3 * qk,
    }


SCALARS = words("slopes[h] gain cap 2.0 0.5 (-1.5) exp2(-8*(h+1)/HQ) 3 (gain+1.0) HQ sqrt(cap)")
SCORES = st.sampled_from(
    words(
        "score score score -score cap*tanh(score/cap) score*score abs(score) sigmoid(score) "
        "min(score,2.0) floor(score) where(kv_idx<3,score,0.5*score) "
        "where(score>0,score,gain*score) "
        "(score+1.0)*2.0 score/(1.0+abs(score)) tanh(score)*gain clamp(score,-cap,cap) "
        "max(score,columns[kv_idx]) score*columns[kv_idx] score*rows[q_idx] exp(-abs(score)) "
        "score/cap "
        "sin(score+1) 30*tanh(score/30)"
    )
)
BIASES = st.sampled_from(
    words(
        "slopes[h]*(kv_idx-q_idx) -slopes[h]*(q_idx-kv_idx) slopes[h]*kv_idx-slopes[h]*q_idx "
        "-abs(q_idx-kv_idx)*slopes[h] exp2(-8*(h+1)/HQ)*(kv_idx-q_idx) (kv_idx-q_idx)*0.25 "
        "bias[h,q_idx,kv_idx] rows[q_idx] columns[kv_idx] rows[q_idx]*columns[kv_idx] "
        "rows[q_idx]+columns[kv_idx] q_idx*kv_idx*0.1 where(kv_idx>q_idx,1.5,-0.5) gain 1.0 "
        "(kv_idx-q_idx)*(kv_idx+q_idx)*gain table[h,min(abs(q_idx-kv_idx),4)] (q_idx//2)*gain "
        "float(kv_idx%3) (kv_idx-q_idx)**2*slopes[h] log2(kv_idx+1.0) q_idx h*0.5 "
        "tanh(rows[q_idx]) "
        "(kv_idx-q_idx)/cap"
    )
)


@st.composite
def score_mods(draw: st.DrawFn) -> str:
    text = draw(SCORES)
    if draw(st.booleans()):
        text = f"{draw(st.sampled_from(SCALARS))} * ({text})"
    for bias in draw(st.lists(BIASES, max_size=3)):
        text = f"({text}) {draw(st.sampled_from(['+', '-']))} ({bias})"
    match draw(st.integers(0, 7)):
        case 0:
            text = f"{draw(st.sampled_from(SCALARS))} * ({text})"
        case 1:
            text = f"cap * tanh(({text}) / cap)"
        case 2:
            text = f"where(kv_idx - q_idx < 2, {text}, -1.0)"
        case 3:
            text = f"{draw(BIASES)}"
        case 4:
            text = f"({text}) + ({draw(SCORES)})"
    return text


def real(node: Node, env: dict[str, Any]) -> torch.Tensor:
    return evaluate(node, env).double()


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.allclose(got, want, rtol=1e-9, atol=1e-7, equal_nan=True)


@settings(bounded, max_examples=250)
@given(score_mods(), st.integers(0, 7), st.booleans())
def test_the_parts_add_up(text: str, seed: int, exact: bool) -> None:
    form, env = form_of(text, exact), points(seed)
    parts = [
        part for part in (form.core, form.multiplier, form.bias, form.row_rest) if part is not None
    ]
    assert not (exact and any("q_start" in variables(part) for part in parts))
    want = LOG2E * real(score(text), env).expand(SQ, SK)
    got = real(form.multiplier, env) * real(form.core, env)
    if form.bias is not None:
        got = got + real(form.bias, env)
    if form.row_rest is not None:
        assert not variables(form.row_rest) & {"kv_idx", "score", "qk"}
        got = got + LOG2E * real(form.row_rest, env)
    assert close(got.expand(SQ, SK), want)
    if form.max_of_core:
        assert form.bias is None
        assert not variables(form.multiplier) & {"q_idx", "kv_idx", "qk", "q_start"}
        assert float(evaluate(form.multiplier, env)) > 0
    for part in (form.core, form.multiplier, form.bias):
        assert part is None or "score" not in variables(part)


ALIBI = [
    "score + slopes[h] * (kv_idx - q_idx)",
    "score - slopes[h] * (q_idx - kv_idx)",
    "score + (kv_idx - q_idx) * slopes[h]",
    "score + slopes[h] * kv_idx - slopes[h] * q_idx",
    "score + exp2(-8 * (h + 1) / HQ) * (kv_idx - q_idx)",
    "score + exp2(-8.0 * (h + 1.0) / HQ) * -(q_idx - kv_idx)",
    "score * gain + (kv_idx - q_idx) / cap",
    "(score / cap + slopes[h] * (kv_idx - q_idx)) * 2.0",
    "score + 0.5 * (kv_idx - q_idx) + slopes[h]",
]


@pytest.mark.parametrize("text", ALIBI)
def test_alibi_is_a_column(text: str) -> None:
    form = form_of(text)
    assert form.core == QK
    assert form.bias is not None
    assert "q_idx" not in variables(form.bias)
    assert form.row_rest is not None


@pytest.mark.parametrize("text", ALIBI)
def test_the_column_stays_small_near_the_diagonal(text: str) -> None:
    """At long lengths, a column of absolute positions would be so large that fp32 rounds the score
    away.
    """
    form = form_of(text)
    assert form.bias is not None
    env = draw_env(0, 1, 1) | {"b": 0, "h": 0, "scale": 1.0, "LOG2E": LOG2E}
    near = evaluate(form.bias, env | {"q_idx": 10**6, "q_start": 10**6, "kv_idx": 10**6})
    assert abs(float(near)) < 10


@pytest.mark.parametrize(
    "text", ["score + gain", "score + rows[q_idx]", "score - tanh(rows[q_idx]) * h + q_idx"]
)
def test_what_a_whole_row_shares_is_dropped(text: str) -> None:
    form = form_of(text)
    assert form.bias is None
    assert form.row_rest is not None
    assert form.max_of_core


@pytest.mark.parametrize(
    "text",
    [
        "score + columns[kv_idx] + 1 / q_idx",
        "score + slopes[h] * (kv_idx - q_idx) - log(float(q_idx))",
        "score + slopes[h] * (kv_idx - q_idx) + 1 / q_idx",
        "score + kv_idx * gain + sqrt(q_idx - 1.0)",
        "score + columns[kv_idx] + where(q_idx > 0, gain, 1 / q_idx)",
        "score + columns[kv_idx] + rows[q_idx]",
        "score + columns[kv_idx] + exp(1000.0 - 400.0 * q_idx)",
    ],
)
def test_a_row_does_not_depend_on_what_is_infinite_in_the_first_of_its_tile(text: str) -> None:
    """Row 0 may see no key, or have an infinite element.

    Other rows of its tile must stay finite.
    """
    form, env = form_of(text), points(0)
    env["rows"][0] = torch.inf
    assert form.bias is not None
    parts = evaluate(form.bias, env), evaluate(form.row_rest or Const(0, Type.INT), env)
    of_rows = [part.expand(SQ, SK)[2:ROWS] for part in parts]
    assert all(part.isfinite().all() for part in of_rows)


def test_an_exact_form_drops_what_no_key_changes() -> None:
    form = form_of("score + slopes[h] * (kv_idx - q_idx) + rows[q_idx]", exact=True)
    assert form.bias is not None
    assert {"q_idx", "kv_idx"} <= variables(form.bias)
    assert form.row_rest is not None
    assert not variables(form.row_rest) & {"kv_idx"}


def test_a_row_that_is_hidden_stays_hidden() -> None:
    form = form_of("score + where(q_idx < 3, 0.0, -inf)")
    assert form.row_rest is None
    assert form.bias is not None
    assert "q_idx" in variables(form.bias)


@pytest.mark.parametrize(
    "text", ["score * where(score > 0, 1.0, 0.1)", "score * floor(score)", "score * silu(score)"]
)
def test_a_slope_with_the_score_in_it_is_no_factor(text: str) -> None:
    found = form_of(text)
    assert "score" not in variables(found.multiplier)
    assert "qk" in variables(found.core)
    assert found.core != QK


def test_a_softcap_costs_one_tanh() -> None:
    form = form_of("cap * tanh(score / cap)")
    assert form.max_of_core
    assert form.finite
    assert "cap" in variables(form.multiplier)
    assert repr(form.core).count("tanh") == 1
    assert getattr(form.core, "fn", None) == "tanh"


@pytest.mark.parametrize(
    ("text", "positive"),
    [
        ("score", True),
        ("score * 2", True),
        ("score * cap", True),
        ("score / cap", True),
        ("score * HQ", True),
        ("-score", False),
        ("score * gain", False),
        ("score * slopes[h]", False),
        ("score * 0", False),
        ("score * h", False),
        ("score * columns[kv_idx]", False),
        ("gain * tanh(score)", True),  # the factor stays with tanh: the multiplier is log2(e)
    ],
)
def test_positive(text: str, positive: bool) -> None:
    assert form_of(text).max_of_core == positive


@pytest.mark.parametrize(
    ("text", "finite"),
    [
        ("score", True),
        ("-score * gain", True),
        ("cap * tanh(score / cap)", True),
        ("where(score > 0, score, 0.1 * score)", True),
        ("sigmoid(score)", True),
        ("score + gain", True),
        ("where(score > 0, score, -inf)", False),
        ("where(kv_idx > 3, score, -inf)", False),
        ("score * slopes[h]", True),
        ("score + columns[kv_idx]", False),
        ("log(abs(score))", False),
        ("log2(score * score)", False),
        ("-1 / abs(score)", False),
        ("-rsqrt(abs(score))", False),
        ("-exp(score)", False),
        ("-exp2(score)", False),
        ("score / h", False),
        ("score - exp(0.5 * (q_idx - kv_idx))", False),
        ("score - exp2(gain * q_idx)", True),
        ("score + where(q_idx < 3, 0.0, -inf)", False),
    ],
)
def test_finite(text: str, finite: bool) -> None:
    """For a finite form, kernels take row maxima without a test for -inf."""
    assert form_of(text).finite == finite


def test_integers_and_scores_that_are_not_used() -> None:
    form = form_of("kv_idx - q_idx")
    assert form.multiplier == Const(0, Type.INT)
    assert form_of("columns[kv_idx]").multiplier == Const(0, Type.INT)
    assert not reads(form.core)
