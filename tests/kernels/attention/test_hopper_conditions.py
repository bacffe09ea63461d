"""The reasons that kgen reports if a spec has no Hopper kernels."""

from __future__ import annotations

import pytest

from kgen.kernels.attention.explaining import explain as page_of
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.schedules.hopper.conditions import (
    OF_ALL,
    OF_BACKWARD,
    OF_NARROW_FORWARD,
    without_kernels,
)
from kgen.kernels.attention.schedules.hopper.plan import plan_hopper
from kgen.pages.text import text as printed
from kgen.spec.load import Loaded, loads

LENS = "buffers: {lens: {shape: [B], dtype: int32}}\n"
PAIR = "buffers: {w: {shape: [HQ, SQ, SK], dtype: fp32}}\n"
PAGED = "paged_kv: {page_size: 8}\npasses: [forward]\n"
BOTH = "passes: [forward, backward]\n"
LATENT = "head_dim: {qk: 192, v: 128}\n"

REFUSED = [
    (f"dtype: fp32\n{BOTH}", "forward", "the dtype is fp32, and Hopper kernels need bf16 or fp16"),
    ("head_dim: 20\n", "forward", "no Hopper tile fits keys of 20 and values of 20 columns"),
    (
        "head_dim: {qk: 256, v: 128}\n",
        "forward",
        "no Hopper tile fits keys of 256 and values of 128 columns",
    ),
    ("mask_mod: q_idx > 5\n", "forward", "the mask removes queries by their position alone"),
    ("mask_mod: kv_idx > 5\n", "forward", "the mask removes keys by their position alone"),
    ("mask_mod: abs(q_idx - kv_idx) < 64 or kv_idx < 64\n", "forward", "several ranges of keys"),
    (f"{PAGED}head_dim: 128\n", "forward", "pages of fewer than 16 keys"),
    (
        f"paged_kv: {{page_size: 64}}\npasses: [forward]\n{LATENT}",
        "forward",
        "pages with keys that are wider",
    ),
    (
        f"{LATENT}{LENS}mask_mod: kv_idx < lens[b]\nscore_mod: 30 * tanh(score / 30)\n",
        "forward",
        "a function of scores would read keys past an end",
    ),
    (
        f"head_dim: 256\n{PAIR}score_mod: score + w[h, q_idx, kv_idx]\n",
        "forward",
        "heads of 256 columns leave no shared memory",
    ),
    (
        f"{PAIR}score_mod: score + w[h, kv_idx, q_idx]\nlengths: {{q: any, kv: any}}\n",
        "forward",
        "the score may read only one buffer for each pair, of fp32 or 16 bits",
    ),
    (
        f"{PAIR}score_mod: score + w[h, q_idx, kv_idx]\nmask_mod: kv_idx < 9\n",
        "forward",
        "do not support with packed sequences, block masks or masks of keys alone",
    ),
    (
        f"{PAIR}score_mod: score + w[h, q_idx, kv_idx]\n{BOTH}",
        "backward",
        "the score reads a buffer for each pair",
    ),
    (
        "head_dim: 64\nmask_mod: abs(q_idx - kv_idx) < 64\n",
        "forward",
        "the ranges of keys are short, where portable kernels are faster for heads of 64 columns",
    ),
    ("head_dim: 64\nvarlen: true\n", "forward", "the ranges of keys are short"),
    (
        f"head_dim: 64\n{PAIR}score_mod: score + w[h, q_idx, kv_idx]\n",
        "forward",
        "heads of 64 columns leave no room for the buffer that the score reads for each pair",
    ),
    (
        "head_dim: 64\nscore_mod: 30 * tanh(score / 30)\nmask_mod: q_idx >= kv_idx\n",
        "forward",
        "used only if score_mod adds no bias and applies no function",
    ),
    (
        "head_dim: 64\nmask_mod: q_idx % 3 == kv_idx % 2\n",
        "forward",
        "used only if some tiles need no mask",
    ),
    (
        f"head_dim: 64\n{LENS}mask_mod: kv_idx < lens[b]\n{BOTH}",
        "backward",
        "have their keys in registers",
    ),
    (
        f"{LATENT}{LENS}mask_mod: kv_idx < lens[b]\n{BOTH}",
        "backward",
        "would have to be cleared in two tiles",
    ),
    (
        "gqa: 4\nbuffers: {ends: {shape: [HQ], dtype: int32}}\nmask_mod: kv_idx < ends[h]\n" + BOTH,
        "backward",
        "query heads share keys, and each has its own end",
    ),
    (
        "buffers: {x: {shape: [SK], dtype: fp32, grad: true}}\nscore_mod: score + x[kv_idx]\n"
        + BOTH,
        "backward",
        "the gradient of a buffer is not a sum over keys alone",
    ),
]


def explain(loaded: Loaded) -> str:
    return printed(page_of(loaded))


def spec(more: str) -> Loaded:
    head = {"head_dim": "head_dim: 128\n", "dtype": "dtype: bf16\n"}
    given = "".join(line for name, line in head.items() if not f"\n{more}".count(f"\n{name}:"))
    return loads(f"kernel: attention\nname: n\n{given}targets: {{triton: {{}}}}\n{more}", "n.yaml")


@pytest.mark.parametrize(("more", "of", "why"), REFUSED)
def test_why_there_are_none(more: str, of: str, why: str) -> None:
    loaded = spec(more)
    plan = plan_attention(loaded)
    missing, hopper = without_kernels(plan), plan_hopper(plan)
    assert why in missing[of]
    assert f"{missing[of]}." in explain(loaded)
    if of == "forward":
        assert hopper is None or hopper.forward is None
    else:
        assert hopper is not None
        assert hopper.dkdv is None


def test_each_condition_is_told_apart() -> None:
    words = [c.otherwise for c in (*OF_ALL, *OF_BACKWARD, *OF_NARROW_FORWARD)]
    assert len(set(words)) == len(words)


@pytest.mark.parametrize(
    "more", [BOTH, f"mask_mod: q_idx >= kv_idx\n{BOTH}", f"head_dim: 64\n{BOTH}"]
)
def test_where_there_are_some(more: str) -> None:
    assert without_kernels(plan_attention(spec(more))) == {}
    assert "No kernels for Hopper" not in explain(spec(more))


ALIBI = "buffers: {s: {shape: [HQ], dtype: fp32}}\nmask_mod: q_idx >= kv_idx\n"
DOCS = "buffers: {doc: {shape: [SK], dtype: int32, sorted: true}}\n"


@pytest.mark.parametrize(
    ("more", "bias", "documents"),
    [
        (f"{ALIBI}score_mod: score + s[h] * (kv_idx - q_idx)\n", True, False),
        # The product cannot start from the bias if a soft cap follows, or if the bias has a second
        # term.
        (f"{ALIBI}score_mod: 30 * tanh(score / 30) + s[h] * kv_idx\n", False, False),
        (f"{ALIBI}score_mod: score + s[h] * kv_idx + exp2(kv_idx * 0.01)\n", False, False),
        (f"{DOCS}mask_mod: doc[q_idx] == doc[kv_idx] and q_idx >= kv_idx\n", False, True),
        # No condition is dropped if the mask compares more, or if it can hide a query from its own
        # key.
        (f"{DOCS}mask_mod: doc[q_idx] == doc[kv_idx] + 1 and q_idx >= kv_idx\n", False, False),
        (f"{DOCS}mask_mod: doc[q_idx] == doc[kv_idx] and q_idx > kv_idx\n", False, False),
        (f"{DOCS}mask_mod: doc[q_idx] == doc[kv_idx]\n", False, False),
    ],
)
def test_what_is_better_done_otherwise(more: str, bias: bool, documents: bool) -> None:
    hopper = plan_hopper(plan_attention(spec(more)))
    assert hopper is not None
    found = hopper.idioms["forward"]
    assert (found.bias is not None, found.documents is not None) == (bias, documents)
    text = explain(spec(more))
    assert ("The bias is linear in the key" in text, "Documents are sorted" in text) == (
        bias,
        documents,
    )
