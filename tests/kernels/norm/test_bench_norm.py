"""The race of norms in Triton's interpreter, whose times have no meaning."""

from __future__ import annotations

import json
from pathlib import Path

from kgen.bench.options import BenchOptions
from kgen.bench.running import bench_specs
from kgen.kernels.norm.bench.shape import ODD_WIDTHS, SMALL, WIDTHS, Shape
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


def test_a_peer_that_fails_is_a_row(tmp_path: Path) -> None:
    options = BenchOptions(("quack",), "4x64", None, device="cpu")
    rows = bench_specs([load(ROOT / "specs" / "rms_norm.yaml")], ROOT / "generated", options)
    assert "quack" in next(r["error"] for r in rows if r["peer"] == "quack")
