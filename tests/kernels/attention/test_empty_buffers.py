"""Buffers without elements: every read is zero, and their gradients are empty.

The cases: all ways to sum a gradient, indices that are read, block masks, decoding, packed
sequences, Hopper kernels.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.interpreters.own_process import interpreted
from support.interpreters.some_cases import emitted, failures

from kgen.kernels.attention.verify.inputs import cases
from kgen.spec.load import loads
from kgen.verify.families import problem_of

HEAD = "kernel: attention\nname: absent\ndtype: bf16\nhead_dim: {head_dim}\n"
T = "t: {shape: [any], dtype: fp32, grad: true}"
AT = "at: {shape: [any], dtype: int32}"
LEARNED = f"buffers: {{{T}}}"
BOTH = f"buffers: {{{T}, {AT}}}"
SPECS = {
    "sum over keys": (LEARNED, "score_mod: score + t[q_idx % 7] * kv_idx"),
    "sum over queries": (BOTH, "score_mod: score + t[at[kv_idx]]"),
    "sum by distance": (LEARNED, "score_mod: score + t[q_idx - kv_idx]"),
    "sum by pair": (LEARNED, "score_mod: score + t[q_idx * kv_idx % 5]"),
    "sum by head": (
        "gqa: 2\nbuffers: {t: {shape: [HQ, any], dtype: fp32, grad: true}}",
        "score_mod: score * (1 + t[h, -1])",
    ),
    "packed": (
        f"varlen: true\n{LEARNED}",
        "score_mod: score + t[h] * q_idx + t[kv_idx] + t[q_idx - kv_idx]",
    ),
    "block mask": (
        f"block_mask: always\nbuffers: {{{AT}}}",
        "mask_mod: at[q_idx] == at[kv_idx] and at[-1] == 0 and kv_idx <= q_idx",
    ),
    "decoding": (
        f"passes: [forward, backward, decode]\n{LEARNED}",
        "score_mod: score + t[kv_idx] + t[-1]",
    ),
    "Hopper": (
        BOTH,
        "score_mod: score + t[-1] * (kv_idx - q_idx)",
        "mask_mod: kv_idx <= q_idx + at[0]",
    ),
    "Hopper's block mask": (
        f"block_mask: always\nbuffers: {{{AT}}}",
        "mask_mod: at[q_idx] == at[kv_idx] and at[-1] == 0 and kv_idx <= q_idx",
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_kernels_read_zeros(name: str, tmp_path: Path) -> None:
    hopper = name.startswith("Hopper")
    text = HEAD.format(head_dim=128 if hopper else 16) + "\n".join(SPECS[name]) + "\n"
    assert interpreted(failures, text, emitted(text, tmp_path), ["no-elements"], hopper) == []


@pytest.mark.parametrize(
    ("mask", "drawn"), [("kv_idx < len(at)", True), ("kv_idx % len(at) < 3", False)]
)
def test_verify_has_the_case_unless_a_length_is_a_divisor(mask: str, drawn: bool) -> None:
    text = f"{HEAD.format(head_dim=16)}buffers: {{{AT}}}\nmask_mod: {mask}\n"
    found = {case.name for case in cases(problem_of(loads(text, "spec.yaml")), quick=True)}
    assert ("no-elements" in found) is drawn
