"""Names in emitted files: each kernel defines the names that it uses, for all sizes and heads in a
spec.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.interpreters.single_file import single
from support.running.linting import wrong_names

from kgen.spec.load import loads

HEAD = "kernel: attention\nname: named\ndtype: {dtype}\nhead_dim: 64\ngqa: {gqa}\n"
BACKWARD = "passes: [forward, backward]\n"
CALLS = {
    "plain": BACKWARD,
    "decoding": "passes: [forward, backward, decode]\nalign: start\n",
    "packed": BACKWARD + "varlen: true\n",
    "own lengths": BACKWARD + "lengths: {kv: {per_batch: true}}\n",
    "pages": "passes: [forward]\npaged_kv: {page_size: 64}\n",
    "lists": BACKWARD + "block_mask: always\n",
    "promised": BACKWARD + "lengths: {q: {multiple_of: 128}, kv: {multiple_of: 128}}\n",
}
BUFFERS = {
    "t": "shape: [HKV], dtype: fp32",
    "u": "shape: [B, HKV], dtype: int32",
    "d": "shape: [HKV, any], dtype: fp32",
}
EXPRESSIONS = (
    "score_mod: score * t[h_kv] / HKV + d[h_kv, q_idx - kv_idx] * (HQ - B)\n"
    "mask_mod: kv_idx < u[b, h_kv] and q_idx + HKV >= kv_idx and (h_kv % 2 == 0 or kv_idx < SK - "
    "SQ)\n"
)


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.thorough)])
def test_every_size_is_defined(dtype: str, tmp_path: Path) -> None:
    """Every kernel reads HKV and the key head, with and without grouped queries."""
    for calls, text in CALLS.items():
        learned = ", grad: true" * ("backward" in text)
        buffers = ", ".join(f"{n}: {{{b}{learned * (n != 'u')}}}" for n, b in BUFFERS.items())
        for gqa in ("1", "2"):
            spec = (
                HEAD.format(dtype=dtype, gqa=gqa) + text + f"buffers: {{{buffers}}}\n" + EXPRESSIONS
            )
            (tmp_path / f"{calls} {gqa}.py").write_text(single(loads(spec, "named.yaml")))
    assert "F821" not in wrong_names([tmp_path])
