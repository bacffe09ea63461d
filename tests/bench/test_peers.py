"""Peers whose packages are missing, the best peer of a case, and neutral shapes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.specs.hand_built import plain, render
from typer.testing import CliRunner

from kgen.bench import plotting, running
from kgen.bench.best import best_peers
from kgen.bench.options import BenchOptions
from kgen.bench.peers import NotInstalled, Package
from kgen.bench.running import bench_specs
from kgen.bench.timing import Failure, failure
from kgen.cli import app
from kgen.diagnostics import KgenError
from kgen.family import family
from kgen.kernels.attention.bench import shape
from kgen.kernels.attention.bench.shape import Shape
from kgen.spec.load import load
from kgen.verify.families import problem_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path of Python."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_package_is_loaded_or_named(packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (packages / "fake_peer.py").write_text("import fake_needed\n")
    with pytest.raises(NotInstalled) as found:
        Package("fake_absent.part", "pip install fake").load()
    assert str(found.value) == "not installed: pip install fake (no module `fake_absent`)"
    with pytest.raises(NotInstalled, match="no module `fake_needed`"):
        Package("fake_peer", "pip install fake").load()
    assert failure(found.value) == Failure(str(found.value), missing=True)
    assert failure(ValueError("wrong")) == Failure("ValueError: wrong")
    errors = capsys.readouterr().err
    assert "ValueError: wrong" in errors
    assert "NotInstalled" not in errors
    (packages / "fake_needed").mkdir()
    (packages / "fake_needed/__init__.py").write_text("")
    (packages / "fake_needed/part.py").write_text("here = 1\n")
    assert Package("fake_needed", "").load("part").here == 1


def test_a_package_that_fails_is_not_called_missing(packages: Path) -> None:
    (packages / "fake_broken.py").write_text("raise ImportError('libcudart.so: too old')\n")
    with pytest.raises(ImportError, match="too old"):
        Package("fake_broken", "pip install fake").load()


def _row(peer: str, milliseconds: float | None, error: str | None = None, **more: Any) -> Any:
    row = {"spec": "s", "pass": "forward", "peer": peer, "milliseconds": milliseconds}
    more = {"missing": False, **more}
    return {**row, "tflops": None, "tbps": None, "ratio": None, "error": error, **more}


def test_a_missing_peer_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of results has no rows of missing peers. The JSON has them, with the reason."""
    reason = "not installed: pip install fa9"
    rows = [
        _row("kgen", 1.0),
        _row("fa9", None, reason, missing=True),
        _row("fa9", None, reason, missing=True, **{"pass": "backward"}),
        _row("flex", None, "not installed: the message of another error"),
    ]
    monkeypatch.setattr(running, "bench_specs", lambda *given: rows)
    command = ["bench", str(ROOT / "specs/full.yaml"), "-o", str(tmp_path)]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.output
    assert found.output.count("fa9") == 2  # of the peer and of its package
    assert f"fa9: {reason}\n1 measured, 1 failed, 1 peer not installed\n" in found.output
    as_json = CliRunner().invoke(app, [*command, "--format", "json"])
    assert [row["error"] for row in json.loads(as_json.stdout)][1:3] == [reason, reason]


def test_the_best_peer_of_each_case() -> None:
    rows = [
        _row("kgen", 1.0),
        _row("kgen-triton", 1.5),
        _row("copy", 0.5),
        _row("flex", 3.0),
        _row("sdpa", 2.0),
        _row("fa9", None, "not installed: pip install fa9"),
        _row("flex", 4.0, shape="1x1x64"),
        _row("kgen", 9.0, **{"pass": "backward"}),
    ]
    best = {case[:3]: row["peer"] for case, row in best_peers(rows).items()}
    assert best == {("s", None, "forward"): "sdpa", ("s", "1x1x64", "forward"): "flex"}


def test_bars_of_the_best_are_labelled_in_bold() -> None:
    figure, axis = plotting.pyplot().subplots()
    series = {"kgen": {"a": 4.0, "b": 4.0}, "flex": {"b": 2.0}, "sdpa": {"a": 3.0, "b": 1.0}}
    plotting.bars(axis, ["a", "b"], series, "%.0f", {"a": "sdpa", "b": "flex"})
    bold = {text.get_text() for text in axis.texts if text.get_fontweight() == "bold"}
    plotting.pyplot().close(figure)
    assert bold == {"3", "2"}


def test_neutral_shapes_are_measured_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {text: Shape.parse(text) for text in ("1x2x32", "1x2x1x48")}
    monkeypatch.setattr(shape, "neutral", lambda problem: shapes)
    render(plain(), tmp_path / "generated")
    options = BenchOptions((), "neutral", tmp_path, device="cpu")
    rows = bench_specs([plain()], tmp_path / "generated", options)
    assert list(dict.fromkeys(row["shape"] for row in rows)) == list(shapes)
    assert all(row["error"] is None for row in rows)
    (path,) = (tmp_path / "interpreter").iterdir()
    assert path.name == "attention-neutral.json"
    heads = [r["workload"]["shape"]["HKV"] for r in json.loads(path.read_text())["reports"]]
    assert heads == [2, 1]
    one = BenchOptions((), "neutral:1x2x32", None, device="cpu")
    rows = bench_specs([plain()], tmp_path / "generated", one)
    assert {row["shape"] for row in rows} == {"1x2x32"}
    with pytest.raises(KgenError, match="`1x2x64` is no neutral shape"):
        bench_specs([plain()], tmp_path / "generated", replace(one, shape="neutral:1x2x64"))
    shapes.clear()
    with pytest.raises(KgenError, match="has no neutral shapes\n --> specs/plain") as caught:
        bench_specs([plain()], tmp_path / "generated", one)
    assert "bf16 with heads of 64 or 128" in str(caught.value.diagnostics[0].hint)


def test_neutral_shapes_of_every_family() -> None:
    """Each is the size that its text stands for."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "specs").glob("*.yaml")):
        one = load(path)
        bench = family(one.spec.kernel).bench
        assert bench is not None
        own, shapes = bench.shape.get(), bench.shape.get().neutral(problem_of(one))
        packed = {text: {"documents": size.batch} for text, size in shapes.items() if own is shape}
        wanted = {text: replace(own.Shape.parse(text), **packed.get(text, {})) for text in shapes}
        assert shapes == wanted
        found.setdefault(one.spec.kernel, set()).update(shapes)
    assert found["linear_attention"] >= {"1x8192x96x96", "8x1024x8x8"}
    assert found["chunk_output"] == set()
    assert all(found[name] for name in found.keys() - {"chunk_output"})


def test_variants_of_a_spec_have_their_own_reports(tmp_path: Path) -> None:
    variants = []
    for name in ("d1", "d2"):
        one = plain()
        one.folder = f"plain/{name}"
        path = tmp_path / "generated" / one.folder / "triton.py"
        path.parent.mkdir(parents=True)
        path.write_text(render(plain(), tmp_path / "other").read_text())
        variants.append(one)
    rows = bench_specs(
        variants, tmp_path / "generated", BenchOptions((), "1x2x32", tmp_path, device="cpu")
    )
    assert list(dict.fromkeys(row["spec"] for row in rows)) == ["plain/d1", "plain/d2"]
    names = [path.name for path in (tmp_path / "interpreter").glob("plain*.json")]
    assert sorted(names) == ["plain-d1.json", "plain-d2.json"]
