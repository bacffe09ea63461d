"""`scripts/large`: that calls are as large as they are meant to be, and that a copy which differs is found."""

from __future__ import annotations

import math
from pathlib import Path
from unittest import mock

import pytest
import torch
from on_gpu import large
from support.interpreters.own_process import interpreted

ROOT = Path(__file__).parents[1]
# The last row of a large call is off.
SHORTENED = """
import importlib.util

spec = importlib.util.spec_from_file_location("kgen_test_large", {path!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)


def rms_norm(x, *args, **kwargs):
    out = module.rms_norm(x, *args, **kwargs)
    if len(x) > 64:
        out.detach()[-1] *= 1.1
    return out
"""


@pytest.mark.parametrize("spec", ["rms_norm", "causal", "varlen_causal", "decode_gqa", "gated_delta_output"])
def test_large_calls_are_copies_of_small_ones(spec: str) -> None:
    found = interpreted(_tried, spec, 30_000)
    assert found.wrong == ()
    assert found.elements > 30_000


def test_a_copy_that_differs_is_found(tmp_path: Path) -> None:
    path = tmp_path / "shortened.py"
    path.write_text(SHORTENED.format(path=str(ROOT / "generated/rms_norm/triton.py")))
    found = interpreted(_tried, "rms_norm", 30_000, path)
    assert [message.split(" by ")[0] for message in found.wrong] == ["out0 differs"]


def test_what_is_no_number_is_a_difference() -> None:
    want = torch.tensor([[1.0, -math.inf]])
    assert large.difference(torch.tensor([[1.0, -math.inf]] * 3), want, 0) == 0
    assert large.difference(torch.tensor([[1.0, -math.inf], [math.nan, -math.inf]]), want, 0) == math.inf
    assert large.difference(torch.tensor([[1.0, 2.0, -4.0, 2.0]]), torch.tensor([[1.0, 2.0]]), 1) == 2.5


def _tried(spec: str, limit: int, file: Path | None = None) -> large.Tried:
    from kgen.verify import interpreter

    interpreter.mend()
    emitted = mock.patch.object(
        large, "emitted", lambda name: file or ROOT / "generated" / name / "triton.py"
    )
    with emitted, mock.patch.object(large, "LONG", 96):
        return large.tried(ROOT / "specs" / f"{spec}.yaml", "cpu", limit)
