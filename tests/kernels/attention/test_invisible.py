"""Rows, heads and sequences that see no key: zeros, a log-sum-exp of -inf, and no gradient,
whatever their factors.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.interpreters.own_process import interpreted
from support.interpreters.some_cases import emitted, failures

from kgen.kernels.attention.verify.inputs import Case
from kgen.spec.load import loads
from kgen.verify.families import problem_of

HEAD = "kernel: attention\nname: unseen\ndtype: {dtype}\nhead_dim: {head_dim}\n"
BACKWARD = "passes: [forward, backward]\n"
COUNTS = "n: {shape: [B], dtype: int32}"
LEARNED = "a: {shape: [HQ], dtype: fp32, grad: true}"
HEADS = "on: {shape: [HQ], dtype: bool}"


def text_of(*lines: str, dtype: str = "fp32", head_dim: int = 16) -> str:
    return HEAD.format(dtype=dtype, head_dim=head_dim) + "\n".join(lines) + "\n"


# The last sequence of the batch has n == 0.
BATCH = (
    BACKWARD,
    f"buffers: {{{COUNTS}, {LEARNED}}}",
    "score_mod: score * a[h] * log(float(n[b])) + a[h] * kv_idx / n[b]",
    "mask_mod: kv_idx < n[b]",
)
SPECS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "batch": (BATCH, ("tile", "ints-zero")),
    "grouped": ((*BATCH, "gqa: 2"), ("tile",)),
    "tables": (
        (
            BACKWARD,
            f"buffers: {{{COUNTS}, keys: {{shape: [HQ, SK], dtype: fp32, grad: true}}, "
            "pairs: {shape: [HQ, SQ, SK], dtype: fp32, grad: true}, "
            "near: {shape: [64], dtype: fp32, grad: true}}",
            "score_mod: score / n[b] + keys[h, kv_idx] / n[b]"
            " + pairs[h, q_idx, kv_idx] / n[b] + near[q_idx - kv_idx] / n[b]",
            "mask_mod: kv_idx < n[b]",
        ),
        ("tile",),
    ),
    "lengths": (
        (BACKWARD, "score_mod: score / SQ * log(float(SK)) + 1 / SK"),
        ("no-keys", "no-queries"),
    ),
    "cache": (
        (
            "passes: [forward, backward, decode]\nlengths: {kv: {per_batch: true}}",
            "score_mod: score / kv_lens[b] - log(float(kv_lens[b]))",
        ),
        ("guarded", "decode"),
    ),
    "packed": (
        (
            BACKWARD + "varlen: true",
            f"buffers: {{{LEARNED}}}",
            "score_mod: score * a[h] / SQ * log(float(SK)) + 1 / SK",
        ),
        ("empty",),
    ),
    "row": (
        (
            BACKWARD,
            "score_mod: score / q_idx + 0.1 * kv_idx + 1 / q_idx - log(float(q_idx))",
            "mask_mod: q_idx > kv_idx",
        ),
        ("off-tile",),
    ),
    "row with a sink": (
        (
            BACKWARD + "sinks: true",
            "score_mod: score - log(float(q_idx))",
            "mask_mod: q_idx > kv_idx",
        ),
        ("off-tile",),
    ),
    "row of few": (
        (
            "passes: [forward, decode]\nalign: start",
            "score_mod: score + 1 / q_idx",
            "mask_mod: q_idx > kv_idx",
        ),
        ("decode-some",),
    ),
    "head": (
        (
            BACKWARD,
            f"buffers: {{{LEARNED}, {HEADS}}}",
            "score_mod: score * a[h] + a[h] * (kv_idx - q_idx)",
            "mask_mod: on[h] and q_idx >= kv_idx",
        ),
        ("unread",),
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_nothing_is_nan(name: str, tmp_path: Path, verdict: Any) -> None:
    lines, cases = SPECS[name]
    text = text_of(*lines)
    path = emitted(text, tmp_path)
    verdict(problem_of(loads(text, "unseen.yaml")), path)
    assert not interpreted(failures, text, path, cases)


SELECTED = {
    "dq": ("batch", "dq"),
    "dk": ("batch", "dk"),
    "a sum of a row": ("tables", "d_keys"),
    "a sum of a pair": ("tables", "ds"),
    "a sum of a distance": ("tables", "d_near_sums"),
    "a log-sum-exp": ("row of few", "l_i"),
}
"""Products that are selected, with their spec. Without the selection they are NaN."""


@pytest.mark.parametrize("what", SELECTED)
def test_each_selection_is_needed(what: str, tmp_path: Path, verdict: Any) -> None:
    name, selected = SELECTED[what]
    lines, cases = SPECS[name]
    text = text_of(*lines)
    path = emitted(text, tmp_path)
    bare, count = re.subn(rf"tl\.where\({selected} == 0\.0, 0\.0, ", "(", path.read_text())
    assert count
    path.write_text(bare)
    verdict(problem_of(loads(text, "unseen.yaml")), path)
    assert interpreted(failures, text, path, cases)


ON_HOPPER = {
    "batch": (BATCH, Case("batch", 130, 200, batch=2, lse=True)),
    "row with a sink": (SPECS["row with a sink"][0], Case("row", 130, 130, lse=True)),
    "head": (SPECS["head"][0], Case("head", 130, 130, heads_kv=2, lse=True, unread=True)),
    "packed": (
        SPECS["packed"][0],
        Case("none", 130, 70, packed=((0, 20), (130, 70), (40, 0)), lse=True),
    ),
}


@pytest.mark.parametrize("name", ON_HOPPER)
def test_nothing_is_nan_on_hopper(name: str, tmp_path: Path, verdict: Any) -> None:
    lines, case = ON_HOPPER[name]
    text = text_of(*lines, dtype="bf16", head_dim=128)
    path = emitted(text, tmp_path)
    assert "_forward_hopper_kernel" in path.read_text()
    verdict(problem_of(loads(text, "unseen.yaml")), path)
    assert not interpreted(failures, text, path, [case], True)


def test_finite_factors_are_not_selected(tmp_path: Path) -> None:
    """A constant, a power of two below 1 and the softmax scale are finite in every row."""
    text = text_of(BACKWARD, "score_mod: score * 0.5 + exp2(-8 * (h + 1) / HQ) * (kv_idx - q_idx)")
    found = emitted(text, tmp_path).read_text()
    assert "== 0.0, 0.0," not in found
