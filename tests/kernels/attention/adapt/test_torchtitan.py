"""Modules for torchtitan against float64, on one rank and over several.

The tests use torchtitan if it is installed, else a stand-in with its signatures.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.packages.torchtitan import stand_in

from kgen.diagnostics import KgenError
from kgen.kernels.attention.adapt.torchtitan import adapter
from kgen.spec.load import loads_variants

CAUSAL = "q_idx + SK - SQ >= kv_idx"
HEADING = "kernel: attention\nname: packed_own\ndtype: fp32\nhead_dim: 16\ngqa: 2\n"
OWN = f"{HEADING}varlen: true\nmask_mod: {CAUSAL}\n"
PROGRAM = Path(__file__).parent / "torchtitan_ranks.py"


def written(text: str, folder: Path) -> None:
    for place, files in adapter(loads_variants(text, "own.yaml")).folders.items():
        (folder / place).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / place / name).write_text(content)
    if importlib.util.find_spec("torchtitan") is None:
        stand_in(folder)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_module_has_the_results_of_float64(ranks: int, tmp_path: Path) -> None:
    written(OWN, tmp_path)
    for found in results(ranks, tmp_path):
        assert len(found) == (4 if ranks == 1 else 8)
        assert {n: e for n, e in found.items() if not max(e.values()) < 1e-5} == {}


@pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"
)
def test_a_model_of_torchtitan_has_the_results_of_pytorch(tmp_path: Path) -> None:
    written(OWN.replace("gqa: 2", "gqa: any"), tmp_path)
    (found,) = results(0, tmp_path)
    assert len(found) > 20
    assert {n: e for n, e in found.items() if not e < 1e-4} == {}


def results(ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Return the errors that each rank prints; with 0 ranks, those of a model."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(ranks), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(max(1, ranks))
    ]
    found = []
    for process in processes:
        out, err = process.communicate(timeout=250)
        assert process.returncode == 0, err[-3000:]
        found.append(json.loads(out.splitlines()[-1]))
    return found


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("varlen: true\n", "", "its sequences are not packed"),
        ("varlen: true\n", "varlen: true\nsinks: true\n", "torchtitan applies sinks"),
        (
            "varlen: true\n",
            "varlen: true\nbuffers: {s: {shape: [HQ], dtype: fp32}}\nscore_mod: score + s[h]\n",
            "torchtitan does not pass `s`",
        ),
    ],
)
def test_a_spec_that_torchtitan_cannot_call(old: str, new: str, said: str) -> None:
    with pytest.raises(KgenError, match=said):
        adapter(loads_variants(OWN.replace(old, new), "own.yaml"))


@pytest.mark.parametrize(
    ("mask", "window"),
    [
        (CAUSAL, (-1, 0)),
        (f"{CAUSAL} and q_idx + SK - SQ - kv_idx < 8", (7, 0)),
        ("", (-1, -1)),
        (f"{CAUSAL} and kv_idx % 2 == 0", None),
    ],
)
def test_a_module_has_one_window(mask: str, window: tuple[int, int] | None) -> None:
    mods = f"mask_mod: {mask}\n" if mask else ""
    made = adapter(loads_variants(f"{HEADING}varlen: true\n{mods}", "own.yaml"))
    text = made.folders["packed_own_torchtitan"]["__init__.py"]
    assert (f"WINDOW = {window}" in text) == (window is not None)
    assert ('raise ValueError(f"packed_own: the kernels have window_size' in text) == (
        window is not None
    )
