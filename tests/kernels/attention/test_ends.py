"""Values that the ends of ranges depend on, and halves of a tile with separate ends."""

from __future__ import annotations

import re

import pytest

from kgen.kernels.attention.plan.ends import ends_of
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.plan.tile_reads import mask_reads
from kgen.kernels.attention.schedules.hopper.plan import plan_hopper
from kgen.render.rendering import render_spec
from kgen.spec.load import loads

NAMES = ("lo", "hi", "full_lo", "full_hi")


def text(mask: str, buffers: str = "", more: str = "") -> str:
    buffers = f"buffers: {{{buffers}}}\n" if buffers else ""
    return (
        f"kernel: attention\nname: x\ndtype: bf16\nhead_dim: 128\n{buffers}mask_mod: {mask}\n{more}"
    )


@pytest.mark.parametrize(
    ("mask", "buffers", "own"),
    [
        ("q_idx >= kv_idx", "", {"hi", "full_hi"}),
        ("abs(q_idx - kv_idx) <= 40", "", {*NAMES}),
        ("kv_idx < 40", "", set()),
        ("kv_idx < n[b]", "n: {shape: [B], dtype: int32}", set()),
        ("q_idx >= kv_idx and kv_idx < n[b]", "n: {shape: [B], dtype: int32}", {"hi", "full_hi"}),
        ("d[q_idx] == d[kv_idx]", "d: {shape: [SQ], dtype: int32, sorted: true}", set()),
        ("kv_idx <= n[q_idx]", "n: {shape: [SQ], dtype: int32, sorted: true}", {"hi"}),
    ],
)
def test_ends_of_halves(mask: str, buffers: str, own: set[str]) -> None:
    ends = ends_of(plan_attention(loads(text(mask, buffers), "x.yaml")).forward)
    assert {name for name in NAMES if getattr(ends, name).of_parts} == own


def test_what_is_searched_for() -> None:
    documents = text(
        "d[q_idx] == d[kv_idx] and q_idx >= kv_idx", "d: {shape: [SQ], dtype: int32, sorted: true}"
    )
    ends = ends_of(plan_attention(loads(documents, "x.yaml")).forward)
    assert ends.searches
    assert ends.lo.searches
    assert not ends.hi.searches
    assert ends.hi.of_parts
    assert not ends.from_first_key().searches


def test_a_range_that_may_begin_at_the_end() -> None:
    mask = "(q_idx <= n[b] < kv_idx) or (q_idx // 33 == kv_idx // 33)"
    plan = plan_attention(
        loads(text(mask, "n: {shape: [B], dtype: int32}", "varlen: true\n"), "x.yaml")
    )
    assert ends_of(plan.forward).lo.may_be_length
    causal = plan_attention(loads(text("q_idx >= kv_idx"), "x.yaml"))
    assert not ends_of(causal.forward).lo.may_be_length


@pytest.mark.parametrize(
    ("score", "shares"), [("30 * tanh(score / 30)", True), ("score * 2", False)]
)
def test_scores_of_hidden_keys(score: str, shares: bool) -> None:
    spec = text("kv_idx < n[b]", "n: {shape: [B], dtype: int32}", f"score_mod: {score}\n")
    plan = plan_hopper(plan_attention(loads(spec, "x.yaml")))
    assert plan is not None
    assert plan.hidden_keys
    assert plan.hidden_scores == shares


def test_what_a_mask_reads() -> None:
    spec = text("m[kv_idx] < q_idx", "m: {shape: [SK], dtype: int32}")
    plan = plan_attention(loads(spec, "x.yaml"))
    (name,) = mask_reads(plan.forward)
    assert mask_reads(plan.forward)[name] == "m"
    assert mask_reads(plan_attention(loads(text("q_idx >= kv_idx"), "x.yaml")).forward) == {}
    pairs = text(
        "m[q_idx, kv_idx] > 0", "m: {shape: [SQ, SK], dtype: int32}", "block_mask: always\n"
    )
    assert mask_reads(plan_attention(loads(pairs, "x.yaml")).forward) == {}


@pytest.mark.parametrize(
    ("mask", "shape", "dtype", "zeros"),
    [
        ("q_idx - kv_idx > m[kv_idx]", "[SK]", "int32", "fixed.m_ptr.dtype.element_ty"),
        ("q_idx - kv_idx > m[kv_idx]", "[SK]", "bf16", "gl.float32"),
        ("m[q_idx, kv_idx] > 0", "[SQ, SK]", "int32", None),
    ],
)
def test_what_a_mask_reads_has_one_type(
    mask: str, shape: str, dtype: str, zeros: str | None
) -> None:
    """In tiles without the mask, zeros replace the read value.

    Triton requires one shape and type per variable.
    """
    more = "block_mask: always\n" if zeros is None else ""
    spec = loads(text(mask, f"m: {{shape: {shape}, dtype: {dtype}}}", more), "x.yaml")
    emitted = render_spec(spec)["hopper.py"]
    found = re.findall(r"= gl.full\(\[BLOCK_N\], 0, ([\w.]+), layout", emitted)
    assert {*found} == ({zeros} if zeros else set())
    assert re.search(r"gl\.load\(\s*fixed\.m_ptr", emitted)


@pytest.mark.parametrize(
    ("score", "linear"),
    [
        ("score + s[h] * (kv_idx - q_idx)", True),
        ("score + 0.5 * (kv_idx - q_idx)", True),
        ("score - s[h] * abs(kv_idx - q_idx)", False),
        ("score", False),
    ],
)
def test_a_log_sum_exp_that_is_linear_in_the_query(score: str, linear: bool) -> None:
    buffers = "s: {shape: [HQ], dtype: fp32}" if "s[h]" in score else ""
    spec = loads(text("abs(q_idx - kv_idx) < 100", buffers, f"score_mod: {score}\n"), "x.yaml")
    plan = plan_hopper(plan_attention(spec))
    assert plan is not None
    assert (plan.rest_slope is not None) == linear
