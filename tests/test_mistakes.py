"""Emitted kernels with a planted mistake fail a quick case in Triton's interpreter.

Each kind of mistake needs its own inputs: strides of other operands, bounds of windows and
documents, lengths of other sequences. Others need numbers for a branch, arguments of launches, or
missing checks.

No mistake writes outside of a tensor, unless that write is the mistake, and then the interpreter
stops it. `tests/mutating` changes files without a plan.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from support.interpreters.own_process import verified

from kgen.render.rendering import render_spec
from kgen.spec.load import load

ROOT = Path(__file__).resolve().parents[1]

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

STRIDES = (
    ("causal_d64", "guarded", "q_ptr + offs_m[:, None] * {stride_qs => stride_ks}"),
    ("causal_d64", "bshd", "q_ptr += b * {stride_qb + h * stride_qh => stride_kb + h * stride_kh}"),
    (
        "causal_d64",
        "stepped",
        "offs_m[:, None] * stride_qs + offs_d[None, :] * {stride_qd => stride_kd}",
    ),
    ("causal_d64", "guarded", "k_ptr + offs_n[:, None] * {stride_ks => stride_vs}"),
    ("causal_d64", "guarded", "v_ptr + offs_n[:, None] * {stride_vs => stride_ks}"),
    ("causal_d64", "stepped", "offs_d[None, :] * {stride_vd => stride_kd}"),
    ("causal_d64", "bshd", "v_ptr += b * {stride_vb + h * stride_vh => stride_kb + h * stride_kh}"),
    (
        "causal_d64",
        "bshd",
        "tl.load(\n            do_ptr + offs_m[:, None] * {stride_dos => stride_qs}",
    ),
    (
        "causal_d64",
        "bshd",
        "do_ptr += b * {stride_dob + h * stride_doh => stride_ob + h * stride_oh} "
        "+ q_start * stride_dos\n    q_live",
    ),
    (
        "causal_d64",
        "bshd",
        "do_ptr += b * {stride_dob + h * stride_doh => stride_dqb + h * stride_dqh} "
        "+ q_start * stride_dos\n    dq_ptr",
    ),
    ("causal_d64", "q-shorter", "dv_ptr + offs_n[:, None] * {stride_dvs => stride_dks}"),
    ("causal_d64", "q-shorter", "b * stride_lb + h * stride_lh + q_idx{ * stride_ls => }"),
    ("decode_gqa", "guarded", "v_ptr + offs_n[:, None] * {stride_vs => stride_ks}"),
    ("decode_gqa", "stepped-again", "offs_d[None, :] * {stride_vd => stride_kd}"),
    ("rms_norm", "padded", "rows[:, None] * {stride_dout => stride_x}"),
    ("fused_add_rms_norm", "padded", "rows[:, None] * {stride_residual => stride_x}"),
    (
        "retention_output",
        "guarded",
        "first * {stride_kt + h_qk * stride_kh => stride_qt + h_qk * stride_qh}",
    ),
    ("retention_output", "stepped", "(start + offs_k)[None, :] * {stride_kd => stride_qd}"),
    ("retention_output", "guarded", " v_ptr + b * stride_vb + first * {stride_vt => stride_ot}"),
    (
        "retention_output",
        "guarded",
        "number * {stride_hn + h * stride_hh => stride_hh + h * stride_hn}",
    ),
)
"""For each mistake: the spec, the case that finds it, and the text with `{right => wrong}`."""
BOUNDS = (
    ("gemma2", "decided-0", "WINDOW = tl.constexpr({4096 => 1 << 20})"),
    ("sliding_window", "decided-0", "WINDOW = tl.constexpr({1024 => 1025})"),
    ("longformer", "decided-0", "WINDOW = tl.constexpr({256 => 1 << 20})"),
    ("decode_sliding_window", "decided-0", "WINDOW = tl.constexpr({1024 => 1025})"),
    ("varlen_alibi", "decided-0", "WINDOW = tl.constexpr({512 => 513})"),
    ("document_causal", "long-documents", "kv_full_hi = tl.minimum(q_start + {1 => 65}, SK)"),
    (
        "document_causal",
        "long-documents",
        "{doc_first_0, doc_first_1 => doc_first_1, doc_first_0} =",
    ),
    ("document_causal", "long-documents", "tl.maximum({doc_first_1 => doc_first_0}, 0), BLOCK_N)"),
    ("decode_gqa", "decode", "tl.load(kv_lens_ptr{ + b * stride_kv_lens_0 => })"),
    ("retention_output", "off-chunk", "pair = (i[:, None] {>= => >} i[None, :])"),
)
LAUNCHES = (
    (
        "causal_d64",
        "guarded",
        "*{q.stride(), *k.stride => k.stride(), *q.stride}(), *v.stride(), *out.stride()",
    ),
    ("causal_d64", "q-shorter", "*dout.stride(), *dk.stride(), *{dv.stride => dk.stride}()"),
    ("causal_d64", "bshd", "*{out.stride(), *dout.stride => dout.stride(), *out.stride}(), *(dlse"),
    ("causal_d64", "off-tile", "HAS_DLSE={dlse is not None => False}"),
    (
        "varlen_causal",
        "tail",
        "{cu_seqlens_q, cu_seqlens_k => cu_seqlens_k, cu_seqlens_q}, B, HQ, TQ, TK, scale, GQA=HQ",
    ),
    ("rms_norm", "padded", "*{x.stride()[:1], *dout.stride => dout.stride()[:1], *x.stride}()[:1]"),
    (
        "retention_output",
        "guarded",
        "*{q.stride(), *k.stride => k.stride(), *q.stride}(), *v.stride()",
    ),
    ("retention_output", "off-chunk", "{T, NT => NT, T}, scale, H=H, HV=HV"),
)
CHECKS = (
    ("padding", "misuse", "{or lens.device != q.device => }"),
    ("decode_gqa", "misuse", "{or kv_lens.device != q.device => }"),
    ("causal", "misuse", "if not {0.0 <  => }scale <= 2.0**127:"),
    ("causal", "k-alone", "{or k.requires_grad => }"),
    ("causal", "lse-alone", "{if dout is None:\n        dout = torch.zeros_like(out) => }"),
    ("retnet", "misuse", '_dense("retnet", "q k v initial_state", q, {k => q}, v'),
)
PLACES = (
    (
        "causal",
        "tiles",
        "kv_full_hi = tl.minimum(q_start + 1, SK) // BLOCK_N * {BLOCK_N => BLOCK_M}",
    ),
    (
        "document_causal",
        "tiles",
        "kv_lo = tl.maximum(doc_first_0, 0) // BLOCK_N * {BLOCK_N => BLOCK_M}",
    ),
    ("causal_alibi", "off-tile", "kv_lo + (i + turn) % wrap * {BLOCK_N => (2 * BLOCK_N)}"),
    (
        "causal_alibi",
        "large",
        "mask = {q_live[None, :] & (q_idx => (q_idx}[None, :] >= kv_idx[:, None])",
    ),
    (
        "causal",
        "one-key-large",
        "mask = {kv_live[None, :] & (q_idx => (q_idx}[:, None] >= kv_idx[None, :])",
    ),
)
"""Tiles: their start, their extent, and elements past the end of their tensors."""
OUTSIDE = (
    (
        "causal",
        "off-tile",
        "delta_ptr + b_h.to(tl.int64) * SQ + q_idx, mask={q_live => (q_live) | True}, other=0.0",
    ),
    ("rms_norm", "three-rows", "weight_ptr + cols, mask={cols < WIDTH => cols <= WIDTH}, other=0"),
)
"""Reads of memory outside a tensor that do not change a result."""
KEYS = (
    ("causal", "launches", "layouts = _layouts(q, {k => v}, v, out)"),
    ("gpt_oss", "launches", "_layouts(q, k, v, {sinks => q}, dout, dlse, out, lse"),
    ("varlen_causal", "launches", "dout, {dlse => out}, out, lse, dq, dk, dv)"),
    ("sliding_window", "launches", "dlse, out, {lse => dq}, dq, dk, dv)"),
    ("decode_gqa", "launches", "layouts = _layouts(q, k, v, {kv_lens => out}, out)"),
    ("causal", "launches", "key = kernel, layouts, {*meta.values() => }"),
    ("causal", "launches", '@triton.jit({do_not_specialize=["HQ", "SQ"] => })\ndef _delta_kernel'),
    ("causal_alibi", "launches", "out, None, out, lse, q, k, {v => slopes}, slopes, scale)"),
    ("gpt_oss", "launches", "_gradients, out, None, {out => lse}, lse, q, k, v, sinks, scale)"),
    ("varlen_causal", "launches", "if {thread := _AHEAD.pop(key, None) => False}:"),
    ("kda", "launches", "layouts = _layouts(do, {dfinal_state => q}, q, k, v, g, a_log, "),
    ("linear_attention_elu", "launches", "(q, k, v, state, {states => cu_seqlens}, cu_seqlens)"),
    ("gated_delta_rule", "launches", "_layouts(q, {k => v}, v, a, a_log, dt_bias, b, initial"),
)
"""Keys of the launch cache."""
BRANCHES = (
    (KINDS, "plain", "ids[:, None] > {2 => 9}"),
    (KINDS, "odd", "level > {7 => 99}"),
)

ROUNDS = (
    (
        "gated_delta_output_varlen",
        "many-chunks",
        "for start in range(0, {seq => tl.minimum(seq, BLOCK)}, BLOCK):",
    ),
    ("gated_delta_output_varlen", "many-chunks", "range(0, {tl.minimum(count, NT) => 1}, BLOCK):"),
    (
        "gated_delta_output_varlen",
        "long-tail",
        "for rest in tl.range(tokens + chunk * BT, T, {NT * BT => T}):",
    ),
    (
        "decode_gqa",
        "splits",
        "for first in tl.range(0, {splits => tl.minimum(splits, BLOCK_S)}, BLOCK_S):",
    ),
    (
        "rms_norm",
        "parts",
        "for start in tl.range(0, {n_parts => tl.minimum(n_parts, ROWS)}, ROWS):",
    ),
)
"""Loops that run a second turn only in large calls."""
SCALED = (
    ("causal_alibi", "one", "qk = tl.dot(q, tl.trans(k)){ =>  * 1.01}"),
    ("causal_alibi", "large", "qk = tl.dot(q, tl.trans(k)){ =>  * 1.01}"),
    ("causal_alibi", "off-tile", "(dq * scale{ =>  * 1.01}).to"),
    ("causal_alibi", "large", "{dv.to => (dv * 1.01).to}("),
    ("causal_alibi", "off-tile", "(dk * scale{ =>  * 1.01}).to"),
    ("decode_gqa", "decode", "qk = tl.dot(q, tl.trans(k)){ =>  * 1.01}"),
    ("rms_norm_fp8", "odd", "out = out * ({1.0 => 1.01} / scale)"),
)
"""Factors of 1.01."""

MISTAKES = (
    *STRIDES,
    *BOUNDS,
    *LAUNCHES,
    *CHECKS,
    *PLACES,
    *OUTSIDE,
    *KEYS,
    *BRANCHES,
    *ROUNDS,
    *SCALED,
)
SAMPLE = (
    STRIDES[4],
    LAUNCHES[1],
    CHECKS[1],
    CHECKS[-1],
    PLACES[3],
    OUTSIDE[1],
    KEYS[0],
    KEYS[-1],
    BRANCHES[0],
    *ROUNDS[3:],
    SCALED[0],
    SCALED[6],
)


def found(spec: str, case: str, mistake: str, folder: Path) -> bool:
    """True if the case fails for a spec, by name or as text, with the mistake in its file."""
    stock = ROOT / "specs" / f"{spec}.yaml"
    if "\n" not in spec:
        loaded = load(stock)
        shutil.copytree(ROOT / "generated" / spec, folder / spec)
    else:
        (folder / "spec.yaml").write_text(spec)
        loaded = load(folder / "spec.yaml")
        (folder / loaded.spec.name).mkdir()
        for name, text in render_spec(loaded).items():
            (folder / loaded.spec.name / name).write_text(text)
    right, wrong = (
        re.sub(r"\{(.*?) => (.*?)\}", rf"\{i}", mistake, flags=re.DOTALL) for i in (1, 2)
    )
    files = [folder / loaded.spec.name / name for name in ("triton.py", "_launch.py")]
    (file,) = [file for file in files if right in file.read_text()]
    file.write_text(file.read_text().replace(right, wrong))
    rows = verified([loaded], folder, device="cpu", timeout=20.0, cases=[case], targets=["triton"])
    return not all(row["ok"] for row in rows)


def named(mistakes: tuple[tuple[str, str, str], ...]) -> list[str]:
    return [f"{'kinds' if spec is KINDS else spec}-{case}" for spec, case, _ in mistakes]


@pytest.mark.parametrize("mistake", SAMPLE, ids=named(SAMPLE))
def test_a_mistake_is_found(mistake: tuple[str, str, str], tmp_path: Path) -> None:
    assert found(*mistake, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("mistake", MISTAKES, ids=named(MISTAKES))
def test_every_mistake_is_found(mistake: tuple[str, str, str], tmp_path: Path) -> None:
    assert found(*mistake, tmp_path)
