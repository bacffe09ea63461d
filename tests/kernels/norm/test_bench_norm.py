"""The race of norms in Triton's interpreter, whose times have no meaning."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kgen.bench.options import BenchOptions
from kgen.bench.running import bench_specs
from kgen.kernels.norm.bench.peers import DoesNotApply, draw_workload, prepare
from kgen.kernels.norm.bench.shape import ODD_WIDTHS, SMALL, WIDTHS, Shape, neutral
from kgen.kernels.norm.verify.problem import problem_of
from kgen.spec.load import load
from kgen.verify.farm.tasks import Here

ROOT = Path(__file__).resolve().parents[3]


def test_sizes() -> None:
    parts = Shape().parts(())
    assert (parts[0].rows, parts[0].width) == SMALL
    assert [p.width for p in parts][1:] == [*WIDTHS, *ODD_WIDTHS]
    assert all(p.parts(()) == [p] for p in parts)
    assert [p.width for p in Shape().parts((64, 128))] == [64, 128]
    assert Shape.parse("8x257").parts(()) == [Shape(8, 257)]


def test_workers_side_by_side(tmp_path: Path) -> None:
    specs = [load(ROOT / "specs" / f"{name}.yaml") for name in ("rms_norm", "layer_norm")]
    options = BenchOptions(("torch", "copy"), "6x64", tmp_path, device="cpu")
    rows = bench_specs(specs, ROOT / "generated", options, Here(2))
    assert [(r["spec"], r["pass"], r["peer"]) for r in rows] == [
        (spec, pass_, peer)
        for spec in ("rms_norm", "layer_norm")
        for pass_ in ("forward", "backward")
        for peer in ("kgen", "torch", "copy")
    ]
    assert all(r["error"] is None and r["tbps"] is not None and r["width"] == 64 for r in rows)
    folder = tmp_path / "interpreter"
    assert sorted(p.name for p in folder.glob("*.json")) == [
        "layer_norm.json",
        "norm.json",
        "rms_norm.json",
    ]
    assert (folder / "norm.png").exists()
    assert json.loads((folder / "rms_norm.json").read_text())["workload"]["sizes"] == [[6, 64]]


def test_missing_peers_say_how_to_install_them() -> None:
    options = BenchOptions(("quack", "liger", "cudnn"), "4x64", None, device="cpu")
    rows = bench_specs([load(ROOT / "specs" / "rms_norm.yaml")], ROOT / "generated", options)
    errors = {row["peer"]: row["error"] for row in rows if row["pass"] == "backward"}
    assert errors == {
        "kgen": None,
        "quack": "not installed: pip install quack-kernels (no module `quack`)",
        "liger": "not installed: pip install liger-kernel (no module `liger_kernel`)",
        "cudnn": "not installed: pip install 'nvidia-cudnn-frontend>=1.32' (no module `cudnn`)",
    }


CUDNN = """
import torch
from torch.nn import functional


def rms_norm(input, weight, bias=None, eps=1e-5):
    assert bias is None and weight.dtype == input.dtype
    return functional.rms_norm(input, input.shape[-1:], weight, eps)


def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    return functional.layer_norm(input, normalized_shape, weight, bias, eps)
"""
"""Stand-in for `cudnn.ops.norm`, with its parameters."""


@pytest.mark.parametrize(("text", "fails"), [(CUDNN, False), (CUDNN.replace("eps)", "9.0)"), True)])
def test_the_norms_of_cudnn(
    text: str, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cudnn/ops").mkdir(parents=True)
    (tmp_path / "cudnn/ops/norm.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    specs = [load(ROOT / "specs" / f"{name}.yaml") for name in ("rms_norm", "layer_norm")]
    options = BenchOptions(("cudnn",), "6x64", None, device="cpu")
    rows = bench_specs(specs, ROOT / "generated", options)
    found = {(r["spec"], r["pass"]): r["error"] for r in rows if r["peer"] == "cudnn"}
    assert list(found) == [(s.folder, p) for s in specs for p in ("forward", "backward")]
    assert all(("disagrees with kgen" in (error or "")) == fails for error in found.values())


def test_cudnn_needs_a_weight_without_offset_and_of_the_inputs_dtype() -> None:
    problem = problem_of(load(ROOT / "specs" / "rms_norm.yaml"))
    for changes in ({"weight_offset": 1}, {"dtypes": {**problem.dtypes, "weight": "fp32"}}):
        other = replace(problem, **changes)
        operands = tuple(
            replace(o, dtype=other.dtypes.get(o.name, o.dtype)) for o in other.operands
        )
        workload = draw_workload(replace(other, operands=operands), 4, 64, "cpu")
        with pytest.raises(DoesNotApply):
            prepare("cudnn", workload, {})


def test_shapes_of_helion() -> None:
    rms, layer = (problem_of(load(ROOT / f"specs/{name}_norm.yaml")) for name in ("rms", "layer"))
    assert neutral(rms)["1179648x256"] == Shape(1179648, 256)
    assert len(neutral(rms)) == 30
    assert len(neutral(layer)) == 38
    assert set(neutral(replace(rms, widths=(4096, 8192)))) == {
        f"{rows}x{width}" for rows in (2048, 4096, 8192, 16384) for width in (4096, 8192)
    }
    assert neutral(replace(rms, widths=(100,))) == {}
