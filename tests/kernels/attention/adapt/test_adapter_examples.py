"""The examples of docs/adapters.md, run in an empty folder."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.packages import hub
from support.packages.torchtitan import stand_in

DOCS = Path(__file__).parents[4] / "docs" / "adapters.md"
MEMORY = """
from transformers.generation.continuous_batching import cache
cache.get_device_and_memory_breakdown = lambda *_: (torch.device("cpu"), 2**30, 0, 0)
"""
"""transformers asks psutil for the memory of a CPU."""


def example(word: str) -> str:
    """Return the block of Python in the docs that contains a word."""
    text = DOCS.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if word in block]
    return str(found)


def run(folder: Path, script: str, *adapt: str) -> None:
    """Write an adapter, and run a script that can import it."""
    own = {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{folder / 'adapters'}:{folder}"}
    (folder / "example.py").write_text(script)
    adapting = ["-m", "kgen", "adapt", *adapt, "--no-prove"] if adapt else ["-c", ""]
    for command in (adapting, ["example.py"]):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env=os.environ | own,
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.thorough
def test_a_script_generates_with_continuous_batching(tmp_path: Path) -> None:
    script = example("generate_batch").replace(
        "import transformers\n", f"import transformers\n{MEMORY}", 1
    )
    script += "assert [len(r.generated_tokens) for r in results.values()] == [4, 4]\n"
    run(tmp_path, script, "gemma2", "--for", "transformers")


def test_a_script_calls_a_module_of_torchtitan(tmp_path: Path) -> None:
    if importlib.util.find_spec("torchtitan") is None:
        stand_in(tmp_path)
    script = example("Attention.Config().build()") + "assert out.shape == (1, 7, 2, 128)\n"
    run(tmp_path, script, "varlen_causal", "--for", "torchtitan")


@pytest.mark.thorough
def test_a_script_replaces_a_layer(tmp_path: Path) -> None:
    model = """
import torch

@kernels.use_kernel_forward_from_hub("RMSNorm")
class RMSNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states):
        raise AssertionError("the layer was not replaced")

model = torch.nn.Sequential(RMSNorm())
"""
    script = example("LayerRepository").replace("import kernels\n", f"import kernels\n{model}", 1)
    script = script.replace('"cuda"', '"cpu"')
    remote = (
        'LayerRepository("OWNER/rms-norm", layer_name="RmsNorm", version=1, trust_remote_code=True)'
    )
    assert remote in script
    build = tmp_path / "adapters" / "rms_norm_hub" / "build"
    local = f'LocalLayerRepository(pathlib.Path("{build}"), layer_name="RmsNorm")'
    script = f"import pathlib\n{script.replace(remote, local)}"
    script += "assert model(torch.ones(2, 64, dtype=torch.bfloat16)).eq(1).all()\n"
    run(tmp_path, "", "rms_norm", "--for", "hub")
    hub.built(build.parent)
    run(tmp_path, script)
