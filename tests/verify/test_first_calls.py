"""What a first call of an emitted function imports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


FIRST_CALL = """
import sys
import torch
sys.path.insert(0, {folder!r})
from sample import {name}
tensors = [torch.ones(shape, dtype=torch.bfloat16, requires_grad=True) for shape in {shapes}]
{name}(*tensors).sum().backward()
assert tensors[0].grad is not None
assert "torch._dynamo" not in sys.modules, "imports all of torch.compile"
"""


@pytest.mark.parametrize(
    ("name", "file", "shapes"),
    [
        ("full", "triton.py", [(1, 1, 16, 128)] * 3),
        ("rms_norm", "triton.py", [(2, 64), (64,)]),
        ("rms_norm", "", [(2, 64), (64,)]),
    ],
    ids=["full", "rms_norm", "a folder"],
)
def test_a_first_call_imports_what_it_needs(
    name: str, file: str, shapes: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """What registers an operator, or chooses a file, must not import torch.compile: seconds of each process."""
    if file:
        shutil.copy(ROOT / "generated" / name / file, tmp_path / "sample.py")
    else:
        shutil.copytree(ROOT / "generated" / name, tmp_path / "sample")
    script = FIRST_CALL.format(folder=str(tmp_path), name=name, shapes=shapes)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
