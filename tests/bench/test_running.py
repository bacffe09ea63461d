"""Benchmarks run dry: workers, rows and reports, on stand-ins whose times mean nothing."""

from __future__ import annotations

import json

import pytest
import torch
from support.specs.hand_built import causal_alibi, plain, render

from kgen.bench.options import BenchOptions
from kgen.bench.running import bench_specs
from kgen.diagnostics import KgenError, MissingError
from kgen.kernels.attention.bench.shape import Shape


def test_dry_run(tmp_path):
    specs = [causal_alibi(), plain()]
    for one in specs:
        render(one, tmp_path / "generated")
    output = tmp_path / "benchmarks"
    options = BenchOptions(("sdpa", "eager"), "1x2x64", output, device="cpu")
    rows = bench_specs(specs, tmp_path / "generated", options)
    assert [(r["spec"], r["pass"], r["peer"]) for r in rows] == [
        (spec, pass_, peer)
        for spec in ("causal_alibi", "plain")
        for pass_ in ("forward", "backward")
        for peer in ("kgen", "eager")
    ]
    assert all(
        row["error"] is None and row["milliseconds"] > 0 and row["first_call"] >= 0 for row in rows
    )
    assert all(row["ratio"] == 1.0 for row in rows if row["peer"] == "kgen")
    folder = output / "interpreter"
    assert sorted(path.name for path in folder.iterdir()) == [
        "attention.json", "attention.png", "causal_alibi.json", "plain.json",
    ]  # fmt: skip
    report = json.loads((folder / "causal_alibi.json").read_text())
    assert report["workload"]["fraction"] == pytest.approx(65 / 128, abs=1e-6)
    assert report["facts"]["versions"]["torch"]
    seconds = report["seconds"]
    assert 0 < seconds["facts"] <= seconds["workload"] <= seconds["measured"]


def test_several_shapes(tmp_path):
    render(plain(), tmp_path / "generated")
    options = BenchOptions((), "1x2x32, 1x2x48", tmp_path, device="cpu")
    rows = bench_specs([plain()], tmp_path / "generated", options)
    assert [(r["shape"], r["pass"]) for r in rows] == [
        (shape, pass_) for shape in ("1x2x32", "1x2x48") for pass_ in ("forward", "backward")
    ]
    (path,) = (tmp_path / "interpreter").iterdir()
    reports = json.loads(path.read_text())["reports"]
    assert path.name == "attention-shapes.json"
    assert [r["workload"]["shape"]["SQ"] for r in reports] == [32, 48]


def test_a_peer_that_fails_or_disagrees_is_a_row(tmp_path):
    path = render(plain(), tmp_path)
    path.write_text(path.read_text().replace(">= lens", "< lens"))
    rows = bench_specs([plain()], tmp_path, BenchOptions(("eager",), "1x2x32", None, device="cpu"))
    assert "disagrees with kgen" in next(r["error"] for r in rows if r["peer"] == "eager")
    path.write_text("import os\nos.abort()\n")
    rows = bench_specs([plain()], tmp_path, BenchOptions(("eager",), "1x2x32", None, device="cpu"))
    assert len(rows) == 4
    assert all("SIGABRT" in row["error"] for row in rows)


def test_usage(tmp_path, monkeypatch):
    render(plain(), tmp_path)
    assert Shape.parse("2x16x8192") == Shape(decode=(2, 16), caches=(8192,))
    with pytest.raises(KgenError, match="not a shape"):
        Shape.parse("2x16")
    with pytest.raises(KgenError, match="unknown peer `fa9`"):
        bench_specs([plain()], tmp_path, BenchOptions(("fa9",)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingError):
        bench_specs([plain()], tmp_path)


def test_first_calls_run_in_fresh_processes(tmp_path):
    one = causal_alibi()
    render(one, tmp_path / "generated")
    options = BenchOptions(["sdpa"], "1x2x40", tmp_path, device="cpu", first_call=True)
    rows = bench_specs([one], tmp_path / "generated", options)
    assert [(row["pass"], row["peer"], row["error"]) for row in rows] == [
        ("first call", "kgen", None),
        ("first call", "torch", None),
    ]
    # Which of the two takes longer hangs on the machine: on a GPU kgen compiles, here the import is
    # nearly all of it.
    assert all(row["milliseconds"] > 100 for row in rows)
    assert [path.name for path in tmp_path.glob("*/*.json") if "first" in path.name] == [
        "attention-first-call.json"
    ]
