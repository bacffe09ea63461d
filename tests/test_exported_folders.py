"""Exported programs load after an import of their folder, before any call.

The folders have several files, or variants.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kgen.render.rendering import render_variants
from kgen.spec.load import loads_variants

ROOT = Path(__file__).parents[1]
VARIANTS = """kernel: norm
name: two
norm: rms
width: any
dtype: [bf16, fp32]
"""
FUNCTIONS = {
    "rms_norm": "function(x, x[0])",
    "two": "function(x, x[0])",
    "gated_delta_output": "function(*(x[None, :, None].expand(1, 64, n, 128) for n in (16, 16, "
    "32)), "
    "x.new_zeros(1, 1, 32, 128, 128), x.new_zeros(1, 64, 32, dtype=torch.float32))",
}
MODEL = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
from {name} import {name} as function
class Model(torch.nn.Module):
    def forward(self, x):
        return {call}
x = torch.linspace(-1, 1, 64 * 128).to(torch.bfloat16).view(64, 128)
"""
MADE = "torch.export.save(torch.export.export(Model(), (x,)), sys.argv[2])\n"
LOADED = """
out = torch.export.load(sys.argv[2]).module()(x)
assert torch.equal(out, Model()(x)), "it is another function"
assert out.float().abs().max() > 0
"""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_process_that_imports_it_loads_it(name: str, tmp_path: Path) -> None:
    places = [ROOT / "generated", tmp_path / "there"]
    if name == "two":
        places[0] = tmp_path / "here"
        write(places[0], name)
    write(places[1], name)
    for place, script in zip(places, (MADE, LOADED), strict=True):
        model = MODEL.format(name=name, call=FUNCTIONS[name])
        done = subprocess.run(
            [
                sys.executable,
                "-W",
                "ignore",
                "-c",
                model + script,
                str(place),
                str(tmp_path / "model.pt2"),
            ],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]


def write(place: Path, name: str) -> None:
    """Write an emitted folder."""
    text = VARIANTS if name == "two" else (ROOT / "specs" / f"{name}.yaml").read_text()
    for folder, files in render_variants(loads_variants(text, Path(f"{name}.yaml"))).items():
        (place / folder).mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (place / folder / file).write_text(content)
