"""The page about the arguments of flex_attention: every argument has a row, and the code on it
runs.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.interpreters.own_process import interpreted

PAGE = Path(__file__).parents[2] / "docs" / "flex-attention.md"


def section(heading: str) -> str:
    """The text of a section."""
    text = PAGE.read_text(encoding="utf-8")
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows(heading: str) -> set[str]:
    """The code in the first column of the table of a section."""
    first = re.findall(r"^\| (.*?) \|", section(heading), re.MULTILINE)
    return {word for cell in first for word in re.findall(r"`(\w+)`", cell)}


def test_every_argument_and_option_has_a_row() -> None:
    from torch.nn.attention.flex_attention import FlexKernelOptions, flex_attention

    assert {*inspect.signature(flex_attention).parameters} <= rows("By argument")
    assert {*FlexKernelOptions.__annotations__} == rows("Kernel options") - {"kgen"} - {"option"}


@pytest.mark.thorough
def test_the_code_runs(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, code in re.findall(
        r"^```python\n# (\w+\.py)\n(.*?)^```", text, re.DOTALL | re.MULTILINE
    ):
        (tmp_path / name).write_text(code)
    commands = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[0].splitlines()
    assert [command.split()[:2] for command in commands] == [["kgen", "import"], ["kgen", "render"]]
    for command in ("python -m " + commands[0], "python -m " + commands[1], "python same.py"):
        run = subprocess.run(
            [sys.executable, *shlex.split(command)[1:]],
            cwd=tmp_path,
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert run.returncode == 0, run.stderr


@pytest.mark.thorough
def test_nested_tensors_are_packed_sequences(tmp_path: Path) -> None:
    spec = (
        "kernel: attention\nname: own_packed\ndtype: fp32\nhead_dim: 16\nvarlen: true\n"
        "mask_mod: q_idx >= kv_idx\n"
    )
    (tmp_path / "own.yaml").write_text(spec)
    command = [sys.executable, "-m", "kgen", "render", "own.yaml", "-o", "."]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert interpreted(nested, tmp_path) < 1e-5


def nested(folder: Path) -> float:
    """The largest difference to PyTorch's attention of each sequence."""
    import torch

    from kgen.verify import interpreter

    interpreter.mend()
    sys.path.insert(0, str(folder))
    from own_packed import own_packed  # type: ignore[import-not-found]

    sequences = [torch.randn(length, 3, 2, 16) for length in (5, 9)]
    q, k, v = (
        torch.nested.nested_tensor([s[:, i] for s in sequences], layout=torch.jagged)
        for i in range(3)
    )
    (code,) = re.findall(
        r"^```python\n(.*?)^```", section("Nested tensors"), re.DOTALL | re.MULTILINE
    )
    names = {"NAME": own_packed, "q": q, "k": k, "v": v}
    exec(code, names)
    wanted = [
        torch.nn.functional.scaled_dot_product_attention(
            *s.permute(1, 2, 0, 3), is_causal=True
        ).transpose(0, 1)
        for s in sequences
    ]
    return float((names["out"] - torch.cat(wanted)).abs().max())
