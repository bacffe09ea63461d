"""Emitted kernels with a mistake in them are found wrong by the quick cases, in Triton's interpreter.

Each row is a spec, what is replaced in its file, and by what, and the case that tells. The mistakes are of classes that
inputs must be drawn for: strides of other operands, bounds of windows, lengths of other sequences, checks left out.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kgen.render.rendering import render_spec
from kgen.spec.load import load
from kgen.verify.verifying import verify_specs

ROOT = Path(__file__).resolve().parents[3]

SWAPS = (
    (
        "sliding_window",
        "v_ptr + offs_n[:, None] * stride_vs",
        "v_ptr + offs_n[:, None] * stride_ks",
        "guarded",
    ),
    ("sliding_window", "offs_e[None, :] * stride_vd", "offs_e[None, :] * stride_kd", "stepped"),
    (
        "sliding_window",
        "v_ptr += b * stride_vb + h * stride_vh",
        "v_ptr += b * stride_kb + h * stride_kh",
        "bshd",
    ),
    (
        "sliding_window",
        "b * stride_lb + h * stride_lh + q_idx * stride_ls",
        "b * stride_lb + h * stride_lh + q_idx",
        "q-shorter",
    ),
    ("decode_gqa", "v_ptr + offs_n[:, None] * stride_vs", "v_ptr + offs_n[:, None] * stride_ks", "guarded"),
    ("decode_gqa", "offs_e[None, :] * stride_vd", "offs_e[None, :] * stride_kd", "stepped-again"),
    ("decode_gqa", "tl.load(kv_lens_ptr + b * stride_kv_lens_0)", "tl.load(kv_lens_ptr)", "decode"),
)
WINDOWS = (
    ("gemma2", "WINDOW = tl.constexpr(4096)", "WINDOW = tl.constexpr(1 << 20)", "decided-0"),
    ("sliding_window", "WINDOW = tl.constexpr(1024)", "WINDOW = tl.constexpr(1025)", "decided-0"),
    ("longformer", "WINDOW = tl.constexpr(256)", "WINDOW = tl.constexpr(1 << 20)", "decided-0"),
    ("decode_sliding_window", "WINDOW = tl.constexpr(1024)", "WINDOW = tl.constexpr(1025)", "decided-0"),
    ("varlen_alibi", "WINDOW = tl.constexpr(512)", "WINDOW = tl.constexpr(513)", "decided-0"),
    (
        "document_causal",
        "kv_full_hi = tl.minimum(q_start + 1, SK)",
        "kv_full_hi = tl.minimum(q_start + 65, SK)",
        "long-documents",
    ),
)
CHECKS = (
    ("padding", "or lens.device != q.device", "", "misuse"),
    ("decode_gqa", "or kv_lens.device != q.device", "", "misuse"),
    ("causal", "if not 0.0 < scale <= 2.0**127:", "if not scale <= 2.0**127:", "misuse"),
    ("causal", "or k.requires_grad", "", "k-alone"),
)
MUTANTS = (*SWAPS, *WINDOWS, *CHECKS)
SAMPLE = (SWAPS[0], WINDOWS[1], CHECKS[1])


def survives(spec, old, new, case, folder):
    """Whether a case finds nothing wrong in the emitted file of a stock spec with some text replaced everywhere."""
    loaded = load(ROOT / "specs" / f"{spec}.yaml")
    (folder / spec).mkdir()
    for name, text in render_spec(loaded).items():
        if name == "triton.py":
            assert old in text
            text = text.replace(old, new)
        (folder / spec / name).write_text(text)
    rows = verify_specs([loaded], folder, device="cpu", cases=[case], targets=["triton"])
    return all(row["ok"] for row in rows)


@pytest.mark.parametrize("mutant", SAMPLE, ids=lambda m: f"{m[0]}-{m[3]}")
def test_a_mistake_is_found(mutant, tmp_path):
    assert not survives(*mutant, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m[0]}-{m[3]}")
def test_every_mistake_is_found(mutant, tmp_path):
    assert not survives(*mutant, tmp_path)
