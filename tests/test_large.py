"""`scripts/large`: that calls are as large as they are meant to be, and that a copy which differs
is found.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from on_gpu import large
from support.interpreters.own_process import interpreted

from kgen.render.rendering import render_spec
from kgen.spec.load import load

ROOT = Path(__file__).parents[1]
# The last row of a large call is off.
SHORTENED = """
from . import triton


def rms_norm(x, *args, **kwargs):
    out = triton.rms_norm(x, *args, **kwargs)
    if len(x) > 64:
        out.detach()[-1] *= 1.1
    return out
"""
CHUNKS = """kernel: chunk_output
name: chunks
dtype: fp16
head_dim: 64
chunk_size: 16
heads: {qk: 1, v: 1}
decay: g[i]
"""


@pytest.mark.parametrize(
    "spec",
    [
        *("rms_norm", "causal", "varlen_causal", "decode_gqa"),
        pytest.param("gated_delta_output", marks=pytest.mark.thorough),
    ],
)
def test_large_calls_are_copies_of_small_ones(spec: str) -> None:
    found = interpreted(_tried, ROOT / "specs" / f"{spec}.yaml", 30_000)
    assert found.wrong == ()
    assert found.elements > 30_000


def test_large_calls_of_chunks_are_copies_of_small_ones(tmp_path: Path) -> None:
    """Along sequences, and along the chunks of one."""
    spec = tmp_path / "chunks.yaml"
    spec.write_text(CHUNKS)
    for name, text in render_spec(load(spec)).items():
        (tmp_path / name).write_text(text)
    found = interpreted(_tried, spec, 20_000, tmp_path / "triton.py")
    assert found.wrong == ()
    assert found.elements > 20_000


def test_a_copy_that_differs_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "rms_norm"
    shutil.copytree(ROOT / "generated/rms_norm", folder)
    path = folder / "shortened.py"
    path.write_text(SHORTENED)
    found = interpreted(_tried, ROOT / "specs/rms_norm.yaml", 30_000, path)
    assert [message.split(" by ")[0] for message in found.wrong] == ["out0 differs"]


def test_what_is_no_number_is_a_difference() -> None:
    want = torch.tensor([[1.0, -math.inf]])
    assert large.difference(torch.tensor([[1.0, -math.inf]] * 3), want, 0) == 0
    assert (
        large.difference(torch.tensor([[1.0, -math.inf], [math.nan, -math.inf]]), want, 0)
        == math.inf
    )
    assert (
        large.difference(torch.tensor([[1.0, 2.0, -4.0, 2.0]]), torch.tensor([[1.0, 2.0]]), 1)
        == 2.5
    )


def _tried(spec: Path, limit: int, file: Path | None = None) -> large.Tried:
    from kgen.verify import interpreter

    interpreter.mend()
    emitted = mock.patch.object(
        large, "emitted", lambda name: file or ROOT / "generated" / name / "triton.py"
    )
    with emitted, mock.patch.object(large, "LONG", 96):
        return large.tried(spec, "cpu", limit)
