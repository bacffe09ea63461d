"""Imports of the first call of an emitted function."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.interpreters.single_file import single

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
    ("name", "alone", "shapes"),
    [
        ("full", True, [(1, 1, 16, 128)] * 3),
        ("rms_norm", True, [(2, 64), (64,)]),
        ("full", False, [(1, 1, 16, 128)] * 3),
        ("rms_norm", False, [(2, 64), (64,)]),
    ],
    ids=["full", "rms_norm", "a folder of attention", "a folder"],
)
def test_a_first_call_imports_what_it_needs(
    name: str, alone: bool, shapes: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """Registering an operator or selecting a file must not import torch.compile, which takes
    seconds per process.
    """
    if alone:
        (tmp_path / "sample.py").write_text(single(ROOT / "specs" / f"{name}.yaml"))
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
