"""Emitted kernels with a mistake in them are found wrong by the quick cases, in Triton's interpreter.

Each mistake is a spec, what is replaced in its file, and by what, and the case that tells. They are of classes that inputs
must be drawn for: strides of other operands, bounds of windows and of documents, lengths of other sequences, numbers that
a branch is for, arguments of launches, checks left out. None writes outside its tensors, which would end the process. `tests/mutating` has all that an adversary finds without a plan.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from apart import verified

from kgen.render.rendering import render_spec
from kgen.spec.load import load

ROOT = Path(__file__).resolve().parents[1]

STRIDES = (
    ("causal_d64", "q_ptr + offs_m[:, None] * stride_qs", "q_ptr + offs_m[:, None] * stride_ks", "guarded"),
    ("causal_d64", "q_ptr += b * stride_qb + h * stride_qh", "q_ptr += b * stride_kb + h * stride_kh", "bshd"),
    ("causal_d64", "offs_m[:, None] * stride_qs + offs_d[None, :] * stride_qd", "offs_m[:, None] * stride_qs + offs_d[None, :] * stride_kd", "stepped"),
    ("causal_d64", "k_ptr + offs_n[:, None] * stride_ks", "k_ptr + offs_n[:, None] * stride_vs", "guarded"),
    ("causal_d64", "v_ptr + offs_n[:, None] * stride_vs", "v_ptr + offs_n[:, None] * stride_ks", "guarded"),
    ("causal_d64", "offs_e[None, :] * stride_vd", "offs_e[None, :] * stride_kd", "stepped"),
    ("causal_d64", "v_ptr += b * stride_vb + h * stride_vh", "v_ptr += b * stride_kb + h * stride_kh", "bshd"),
    ("causal_d64", "do_ptr + offs_m[:, None] * stride_gs", "do_ptr + offs_m[:, None] * stride_qs", "bshd"),
    ("causal_d64", "do_ptr += b * stride_gb + h * stride_gh", "do_ptr += b * stride_ob + h * stride_oh", "bshd"),
    ("causal_d64", "dv_ptr + offs_n[:, None] * stride_ws", "dv_ptr + offs_n[:, None] * stride_os", "q-shorter"),
    ("causal_d64", "b * stride_lb + h * stride_lh + q_idx * stride_ls", "b * stride_lb + h * stride_lh + q_idx", "q-shorter"),
    ("decode_gqa", "v_ptr + offs_n[:, None] * stride_vs", "v_ptr + offs_n[:, None] * stride_ks", "guarded"),
    ("decode_gqa", "offs_e[None, :] * stride_vd", "offs_e[None, :] * stride_kd", "stepped-again"),
    ("rms_norm", "rows[:, None] * stride_dout", "rows[:, None] * stride_x", "padded"),
    ("fused_add_rms_norm", "rows[:, None] * stride_residual", "rows[:, None] * stride_x", "padded"),
    ("retention_output", "first * stride_kt + h_qk * stride_kh", "first * stride_qt + h_qk * stride_qh", "guarded"),
    ("retention_output", "(start + offs_k)[None, :] * stride_kd", "(start + offs_k)[None, :] * stride_qd", "stepped"),
    ("retention_output", "first * stride_vt + h * stride_vh", "first * stride_ot + h * stride_oh", "guarded"),
    ("retention_output", "number * stride_hn + h * stride_hh", "number * stride_hh + h * stride_hn", "guarded"),
)  # fmt: skip
BOUNDS = (
    ("gemma2", "WINDOW = tl.constexpr(4096)", "WINDOW = tl.constexpr(1 << 20)", "decided-0"),
    ("sliding_window", "WINDOW = tl.constexpr(1024)", "WINDOW = tl.constexpr(1025)", "decided-0"),
    ("longformer", "WINDOW = tl.constexpr(256)", "WINDOW = tl.constexpr(1 << 20)", "decided-0"),
    ("decode_sliding_window", "WINDOW = tl.constexpr(1024)", "WINDOW = tl.constexpr(1025)", "decided-0"),
    ("varlen_alibi", "WINDOW = tl.constexpr(512)", "WINDOW = tl.constexpr(513)", "decided-0"),
    ("document_causal", "kv_full_hi = tl.minimum(q_start + 1, SK)", "kv_full_hi = tl.minimum(q_start + 65, SK)", "long-documents"),
    ("document_causal", "doc_first_0, doc_first_1 =", "doc_first_1, doc_first_0 =", "long-documents"),
    ("document_causal", "tl.maximum(doc_first_1, 0), BLOCK_N)", "tl.maximum(doc_first_0, 0), BLOCK_N)", "long-documents"),
    ("decode_gqa", "tl.load(kv_lens_ptr + b * stride_kv_lens_0)", "tl.load(kv_lens_ptr)", "decode"),
    ("retention_output", "pair = (i[:, None] >= i[None, :])", "pair = (i[:, None] > i[None, :])", "off-chunk"),
)  # fmt: skip
WITHIN = " " * 16
"""A launch is that far within its function, and the parameters of a kernel are not."""
LAUNCHES = (
    ("causal_d64", "*q.stride(), *k.stride(), *v.stride(), *out.stride()", "*k.stride(), *q.stride(), *v.stride(), *out.stride()", "guarded"),
    ("causal_d64", "*dout.stride(), *dk.stride(), *dv.stride()", "*dout.stride(), *dk.stride(), *dk.stride()", "q-shorter"),
    ("causal_d64", "*out.stride(), *dout.stride(), *(dlse", "*dout.stride(), *out.stride(), *(dlse", "bshd"),
    ("causal_d64", "HAS_DLSE=dlse is not None", "HAS_DLSE=False", "off-tile"),
    ("varlen_causal", f"{WITHIN}cu_seqlens_q, cu_seqlens_k, B", f"{WITHIN}cu_seqlens_k, cu_seqlens_q, B", "tail"),
    ("rms_norm", "*x.stride()[:1], *dout.stride()[:1]", "*dout.stride()[:1], *x.stride()[:1]", "padded"),
    ("retention_output", "*q.stride(), *k.stride(), *v.stride()", "*k.stride(), *q.stride(), *v.stride()", "guarded"),
    ("retention_output", "T, NT, scale, H=H, HV=HV", "NT, T, scale, H=H, HV=HV", "off-chunk"),
)  # fmt: skip
CHECKS = (
    ("padding", "or lens.device != q.device", "", "misuse"),
    ("decode_gqa", "or kv_lens.device != q.device", "", "misuse"),
    ("causal", "if not 0.0 < scale <= 2.0**127:", "if not scale <= 2.0**127:", "misuse"),
    ("causal", "or k.requires_grad", "", "k-alone"),
    ("causal", "if dout is None:\n        dout = torch.zeros_like(out)", "", "lse-alone"),
)
KINDS = """
kernel: norm
name: kinds
norm: rms
width: any
dtype: bf16
buffers:
  ids: {shape: [ROWS], dtype: int32}
params:
  level: {type: int, runtime: true}
output_mod: where(ids > 2, -y, y) * (2.0 if level > 7 else 1.0)
passes: [forward, backward]
targets: {triton: {}}
"""
BRANCHES = ((KINDS, "ids[:, None] > 2", "ids[:, None] > 9", "plain"), (KINDS, "level > 7", "level > 99", "odd"))
MISTAKES = (*STRIDES, *BOUNDS, *LAUNCHES, *CHECKS, *BRANCHES)
SAMPLE = (STRIDES[4], LAUNCHES[1], CHECKS[1], BRANCHES[0])


def found(spec: str, old: str, new: str, case: str, folder: Path) -> bool:
    """Whether a case finds the file of a spec, by its name or as text, wrong with some text replaced everywhere."""
    path = ROOT / "specs" / f"{spec}.yaml"
    if "\n" in spec:
        path = folder / "spec.yaml"
        path.write_text(spec)
    loaded = load(path)
    own = folder / loaded.spec.name
    if "\n" in spec:
        own.mkdir()
        for name, text in render_spec(loaded).items():
            (own / name).write_text(text)
    else:
        shutil.copytree(ROOT / "generated" / spec, own)
    file = own / "triton.py"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    rows = verified([loaded], folder, device="cpu", timeout=20.0, cases=[case], targets=["triton"])
    return not all(row["ok"] for row in rows)


def named(mistakes: tuple[tuple[str, ...], ...]) -> list[str]:
    return [f"{'kinds' if spec is KINDS else spec}-{case}" for spec, _, _, case in mistakes]


@pytest.mark.parametrize("mistake", SAMPLE, ids=named(SAMPLE))
def test_a_mistake_is_found(mistake: tuple[str, str, str, str], tmp_path: Path) -> None:
    assert found(*mistake, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("mistake", MISTAKES, ids=named(MISTAKES))
def test_every_mistake_is_found(mistake: tuple[str, str, str, str], tmp_path: Path) -> None:
    assert found(*mistake, tmp_path)
