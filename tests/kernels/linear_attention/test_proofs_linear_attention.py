"""Obligations of linear attention: proved for stock specs, refuted for planted errors."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import z3

from kgen.kernels.linear_attention.prove.claims import (
    ADDED,
    EACH,
    EXACT,
    EXACT_BACK,
    EXACT_STEP,
    INSIDE,
    INT32,
    OWNER,
    PARTS,
    POWERS,
    SUMS,
    TWICE,
)
from kgen.kernels.linear_attention.prove.exact import exact
from kgen.kernels.linear_attention.prove.obligations import (
    obligations,
    of_pairs,
    of_text,
    rendered,
)
from kgen.prove.obligations import Decision, Verdict, decide
from kgen.spec.load import Loaded, load, loads

ROOT = Path(__file__).resolve().parents[3]
STOCK = [
    path.stem
    for path in sorted((ROOT / "specs").glob("*.yaml"))
    if "kernel: linear_attention" in path.read_text()
]
SAMPLE = ("retnet", "linear_attention_elu")
TIMEOUT = 10.0
BY_COLUMN = """
kernel: linear_attention
name: by_column
dtype: fp16
head_dim: {qk: 128, v: 64}
chunk_size: 32
buffers:
  w: {shape: [T, HV, K], dtype: bf16, grad: true}
  b: {shape: [T, HV], dtype: bf16, grad: true}
decay: -softplus(w[t, h, c])
gate_base: 2
rule: delta
beta: sigmoid(b[t, h])
varlen: true
passes: [forward, backward, decode]
"""


@cache
def stock(name: str) -> Loaded:
    return load(ROOT / "specs" / f"{name}.yaml") if name in STOCK else loads(BY_COLUMN, "x.yaml")


@cache
def text_of_stock(name: str) -> str:
    return rendered(stock(name))


def all_proved(found: list[Decision]) -> None:
    assert found
    assert [one.message for one in found if one.verdict is not Verdict.PROVED] == []


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_stock_specs(name: str) -> None:
    all_proved([decide(o, TIMEOUT) for o in obligations(stock(name))])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["by_column", *(n for n in STOCK if n not in SAMPLE)])
def test_all_other_specs(name: str) -> None:
    all_proved([decide(o, TIMEOUT) for o in obligations(stock(name))])


def test_rendering_proves_some_of_them() -> None:
    some = {(o.kernel, o.what) for o in of_pairs(stock("retnet"))}
    assert some < {(o.kernel, o.what) for o in obligations(stock("retnet"))}
    assert {INSIDE, POWERS} <= {what for _, what in some}


@pytest.mark.parametrize("name", ["G", "seq", "W"])
def test_buffers_with_names_of_kernels(name: str) -> None:
    text = (
        "kernel: linear_attention\nname: sample\ndtype: bf16\nhead_dim: 64\nchunk_size: 16\n"
        f"buffers: {{{name}: {{shape: [T, HV], dtype: fp32, grad: true}}}}\n"
        f"decay: -abs({name}[t, h])\nrule: delta\n"
    )
    loaded = loads(text, "sample.yaml")
    all_proved([decide(o, TIMEOUT) for o in (*of_pairs(loaded), *exact(loaded, rendered))])


@pytest.mark.parametrize("name", SAMPLE)
def test_facts_can_be_true(name: str) -> None:
    """Contradicting facts would prove everything, and so would conditions that never hold."""
    for obligation in of_text(stock(name), text_of_stock(name)):
        assert possible(*obligation.facts), (obligation.kernel, obligation.what)
        for text, claim in obligation.parts:
            if z3.is_implies(claim):
                there = possible(*obligation.facts, claim.arg(0))
                assert there, (obligation.kernel, obligation.what, text)


def possible(*facts: z3.BoolRef) -> bool:
    solver = z3.SimpleSolver()
    solver.set("timeout", 2000)
    solver.add(*facts)
    return bool(solver.check() != z3.unsat)


# --- planted errors ------------------------

ROW = "live = (i < end - first)[:, None]"
CUT = "live = (i <= end - first)[:, None]"
END = "end = tl.minimum(tl.load(cu_seqlens_ptr + seq + 1), T)"
PAIR = 'tl.where(pair, G[:, None] - G[None, :], float("-inf"))'
HALF = "((half | 1) << level)"
TILE = "offs_v = pid % blocks * BLOCK_V + tl.arange(0, BLOCK_V)"
MORE = "for n in range(count, "
WRONG = [
    ("retnet", "values_back", INSIDE, ROW, CUT),
    ("retnet", "states", INSIDE, "for n in range(count):", "for n in range(count + 1):"),
    ("by_column", "output", INSIDE, "h_qk = h // (HV // H)", "h_qk = h"),
    ("linear_attention_elu", "output", INSIDE, END, "end = tl.load(cu_seqlens_ptr + seq + 1)"),
    ("linear_attention_elu", "states", INSIDE, "NT = T // 64 + N", "NT = T // 64 + 1"),
    ("linear_attention_elu", "all", OWNER, "NT = T // 64 + N", "NT = T // 64 + 1"),
    ("retnet", "output", INT32, "(slot % NT).to(tl.int64) * BT", "slot % NT * BT"),
    ("retnet", "values_back", INT32, ">= 2**24", ">= 2**26"),
    ("retnet", "output", POWERS, PAIR, "G[:, None] - G[None, :]"),
    ("retnet", "states", POWERS, "tl.exp2(G_last - G)", "tl.exp2(G - G_last)"),
    ("by_column", "pairs", POWERS, HALF, "(half << level)"),
    ("retnet", "output", TWICE.format("o"), TILE, TILE.replace("BLOCK_V +", "(BLOCK_V // 2) +")),
    ("retnet", "output", EACH.format("o"), TILE, TILE.replace("% blocks", "% blocks // 2")),
    ("retnet", "output", INSIDE, "states_ptr + chunk", "states_ptr - (h + 1) * K * V + chunk"),
    ("gated_delta_rule", "backward", ADDED, "grad_a_log.sum(0)", "grad_a_log.sum(1)"),
]
MORE_WRONG = [
    ("by_column", "pairs_back", POWERS, "G_rows + (sub * 16 + 15) * K", "G_rows + sub * 16 * K"),
    ("by_column", "gates", SUMS, "tl.where(live[:, None], decay, 0.0)", "decay + 1.0"),
    ("by_column", "q_map_back", EACH.format("dq"), "live = (i < end", "live = (i + 1 < end"),
    ("by_column", "states", EACH.format("new"), MORE, MORE.replace("count", "count + 1")),
    ("by_column", "gates_back", PARTS.format("dbetas"), "range(1, BETA_", "range(2, BETA_"),
]
"""Each takes as long as three others."""


@pytest.mark.parametrize(
    ("name", "kernel", "what", "old", "new"),
    [*WRONG, *(pytest.param(*x, marks=pytest.mark.thorough) for x in MORE_WRONG)],
)
def test_a_planted_error_is_refuted(name: str, kernel: str, what: str, old: str, new: str) -> None:
    text = text_of_stock(name)
    assert old in text
    found = [
        decide(o, TIMEOUT)
        for o in of_text(stock(name), text.replace(old, new), only=kernel)
        if o.what == what
    ]
    wrong = [one for one in found if one.verdict is Verdict.REFUTED]
    assert wrong, [one.message for one in found]
    assert all(one.why for one in wrong)


def test_a_second_launch_of_a_kernel_is_proved() -> None:
    """With `save: recompute`, backward launches the kernel of the output again."""
    lines = (
        "kernel: linear_attention\nname: again\ndtype: bf16\nhead_dim: 64\noutput_norm: rms\n"
        "save: recompute\npasses: [forward, backward]\n"
    )
    loaded = loads(lines, "again.yaml")
    launch = "_output_kernel, slots * HV"
    forward, between, rest = rendered(loaded).split(launch)
    text = f"{forward}{launch}{between}_output_kernel, 2 * slots * HV{rest}"
    found = [decide(o, TIMEOUT) for o in of_text(loaded, text, only="output") if o.what == INSIDE]
    assert Verdict.REFUTED in {one.verdict for one in found}


WRONG_FORMS = [
    ("retnet", EXACT, "first = begin + n * BT", "first = begin + n * BT + 1"),
    ("by_column", EXACT_BACK, "dA = -tl.dot(", "dA = tl.dot("),
    ("by_column", EXACT, "h_qk = h // (HV // H)", "h_qk = h % H"),
    ("retnet", EXACT_STEP, "v_ptr + batch * stride_v_b +", "v_ptr +"),
]
MORE_WRONG_FORMS = [
    ("retnet", EXACT, "state = state * tl.exp2(G_last)", "state = state * tl.exp2(G_last) * 2"),
    ("by_column", EXACT, "- tl.dot(W, low)", "+ tl.dot(W, low)"),
    ("by_column", EXACT, "return -tl.dot(lower", "return tl.dot(lower"),
    ("by_column", EXACT_BACK, "k = (k * tl.exp2(tl.load(G_ptr + at)))", "k = (k * 1)"),
    ("by_column", EXACT_BACK, "tl.sum(dG, 0)[None, :] - tl.cumsum(dG, 0) + dG", "dG"),
    ("by_column", EXACT_STEP, "new = v - tl.sum(", "new = v + tl.sum("),
    ("by_column", EXACT_BACK, "h * (HV // H) + member", "h + member * H"),
    ("retnet", EXACT, "k_ptr + batch * stride_k_b +", "k_ptr +"),
]
"""Each takes as long as ten other tests."""
OUTSIDE = "(seq.to(tl.int64) * HV + h) * K * V"


@pytest.mark.parametrize(
    ("name", "what", "old", "new"),
    [*WRONG_FORMS, *(pytest.param(*x, marks=pytest.mark.thorough) for x in MORE_WRONG_FORMS)],
)
def test_a_wrong_form_is_refuted(name: str, what: str, old: str, new: str) -> None:
    def text_of(loaded: Loaded) -> str:
        text = rendered(loaded)  # short chunks have no quarters of inverses
        assert old in text or loaded.spec.chunk_size < stock(name).spec.chunk_size
        return text.replace(old, new)

    found = {o.what: decide(o, TIMEOUT) for o in exact(stock(name), text_of)}
    assert found[what].verdict is Verdict.REFUTED
    assert "differs" in found[what].why


def test_an_access_outside_is_refuted() -> None:
    def text_of(loaded: Loaded) -> str:
        return rendered(loaded).replace(OUTSIDE, OUTSIDE.replace("h)", "h + HV)"))

    found = {o.what: decide(o, TIMEOUT) for o in exact(stock("retnet"), text_of)}
    assert found[EXACT].verdict is Verdict.REFUTED
    assert "of initial_state does not exist" in found[EXACT].why
