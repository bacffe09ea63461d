"""Masks of transformers that match the mask of a spec, in any spelling."""

from __future__ import annotations

import pytest

from kgen.kernels.attention.adapt.derived import checked
from kgen.kernels.attention.adapt.requests import Request, own_request
from kgen.spec.load import loads

CAUSAL, FULL = Request(causal=True), Request(causal=False)


@pytest.mark.parametrize(
    ("mods", "request_"),
    [
        ("", FULL),
        ("score_mod: 2.0 * score", FULL),
        ("mask_mod: q_idx >= kv_idx", CAUSAL),
        ("mask_mod: not (kv_idx > q_idx)", CAUSAL),
        ("score_mod: where(q_idx >= kv_idx, score, -inf)", CAUSAL),
        ("mask_mod: q_idx >= kv_idx and q_idx - kv_idx < 8", Request(causal=True, window=8)),
        (
            "params: {w: 8}\nmask_mod: kv_idx <= q_idx and q_idx - kv_idx < w",
            Request(causal=True, window=8),
        ),
        ("mask_mod: 0 <= q_idx - kv_idx <= 7", Request(causal=True, window=8)),
        ("mask_mod: abs(q_idx - kv_idx) <= 8", Request(causal=False, window=8)),
        ("mask_mod: q_idx - kv_idx < 9 and kv_idx - q_idx < 9", Request(causal=False, window=8)),
        ("mask_mod: q_idx <= kv_idx", None),
        ("mask_mod: q_idx > kv_idx", None),
        ("mask_mod: q_idx - kv_idx < 8", None),
        ("mask_mod: q_idx - kv_idx < 9 and kv_idx - q_idx < 8", None),
        ("mask_mod: q_idx >= kv_idx and q_idx // 8 == kv_idx // 8", None),
        ("mask_mod: q_idx >= kv_idx or kv_idx < 4", None),
        (
            (
                "params: {w: {type: int, runtime: true}}\n"
                "mask_mod: q_idx >= kv_idx and q_idx - kv_idx < w"
            ),
            None,
        ),
        ("score_mod: score + where(q_idx >= kv_idx, 0.0, -inf)", Request(causal=True)),
        ("score_mod: score + where(q_idx >= kv_idx, 0.0, -1e4)", Request(causal=False)),
        (
            "buffers: {doc: {shape: [B, SK], dtype: int32}}\n"
            "mask_mod: q_idx >= kv_idx and doc[b, q_idx] == doc[b, kv_idx]",
            None,
        ),
    ],
)
def test_a_mask_is_a_request_in_any_spelling(mods: str, request_: Request | None) -> None:
    text = f"kernel: attention\nname: own\ndtype: bf16\nhead_dim: 64\n{mods}\n"
    assert own_request(checked(loads(text, "own.yaml"))) == request_
