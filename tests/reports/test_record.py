"""`kgen report`, of a small ledger and small benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_explained import Read, assert_harmless

from kgen.cli import app
from kgen.diagnostics import KgenError
from kgen.pages.model import Bars, Page, Table, plain
from kgen.reports.html import html
from kgen.reports.record import record
from kgen.spec.load import Loaded, load
from kgen.verify.ledger import Where, file_hash
from kgen.verify.ledger import record as enter

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def generated(tmp_path: Path) -> Path:
    """Two files: one that ran, one that did not."""
    folder = tmp_path / "generated"
    for name in ("causal", "rms_norm"):
        (folder / name).mkdir(parents=True)
        (folder / name / "triton.py").write_text(f"{name} = 1\n")
    path = folder / "causal/triton.py"
    rows = [{"ok": True, "pass": "forward", "outputs": {"out": (0.002, 0.75), "dq": (0.9, 0.5)}}]
    versions = {"torch": "2.11.0"}
    where = Where(f"GPU {HOSTILE}", "9.0", versions, "torch 2.11.0")
    enter(folder, path, file_hash(path), rows, where, quick=False)
    return folder


@pytest.fixture
def specs() -> list[Loaded]:
    return [load(ROOT / f"specs/{name}.yaml") for name in ("causal", "rms_norm")]


def row(spec: str, peer: str, **more: Any) -> dict[str, Any]:
    known = {"tflops": 100.0, "tbps": None, "milliseconds": 1.0, "ratio": 1.0, "error": None}
    return {"spec": spec, "pass": "forward", "peer": peer, **known, **more}


def bench(folder: Path, name: str, value: Any) -> None:
    path = folder / "gpu" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def report(spec: str, *rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": 1,
        "spec": spec,
        "facts": {"device": "GPU", "versions": {"torch": "2"}},
        "rows": [*rows],
    }


def bars(page: Page) -> dict[str, Bars]:
    return {b.title: b for section in page.sections for b in section.blocks if isinstance(b, Bars)}


def cells(page: Page, title: str) -> list[list[str]]:
    (section,) = [s for s in page.sections if s.title == title]
    (table,) = [b for b in section.blocks if isinstance(b, Table)]
    return [[plain(cell) for cell in row] for row in table.rows]


def test_the_ledger(specs: list[Loaded], generated: Path, tmp_path: Path) -> None:
    page = record(specs, generated, tmp_path / "none")
    assert page.summary == "2 specs, 4 files: 1 verified, 1 unrecorded, 2 missing"
    by_file = {group.name: group.values for group in bars(page)["Files by state"].groups}
    assert by_file == {
        "cuda.py": {"missing": 2.0},
        "triton.py": {"verified": 1.0, "unrecorded": 1.0},
    }
    errors = bars(page)
    (worst,) = errors["attention: error divided by eager's, worst of all outputs"].groups
    assert (worst.name, [*worst.values.values()]) == ("causal", [0.75])
    (output,) = errors["attention: error of the output"].groups
    assert [*output.values.values()] == [0.002]
    assert page.sections[-1].title == "Speed"
    files = {row[0]: row[1:] for row in cells(page, "Files")}
    assert files["causal/triton.py"] == [
        "verified",
        f"GPU {HOSTILE}",
        "0.75 (out, error 0.002)",
        "",
    ]
    assert files["rms_norm/triton.py"][0] == "unrecorded"
    assert files["rms_norm/cuda.py"][0] == "missing"
    assert cells(page, "Where files ran") == [[f"GPU {HOSTILE}, torch 2.11.0", "1", ""]]
    assert HOSTILE in assert_harmless(html(page)).text


def test_benchmarks(specs: list[Loaded], generated: Path, tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks"
    causal = report(
        "causal",
        row("causal", "kgen", tflops=600.0),
        row("causal", "flex", tflops=300.0, ratio=2.0),
    )
    full = report(
        "full",
        row("full", "kgen", tflops=700.0),
        row("full", "flex", tflops=None, milliseconds=None, error=HOSTILE),
    )
    full["rows"].append(row("full", "sdpa", tflops=350.0, ratio=8.0))
    bench(folder, "causal.json", causal)
    bench(folder, "family.json", {"format": 1, "reports": [causal, full]})
    widths = [
        row("w", "kgen", tflops=None, tbps=2.0 + n, width=2**n, rows=8, graph=n == 1)
        for n in range(2)
    ]
    bench(folder, "widths.json", report("w", *widths))
    bench(folder, "other.json", {"facts": [], "rows": 3})
    page = record(specs, generated, folder)
    titles = [
        section.title for section in page.sections if section.title.startswith(("Speed", "Not"))
    ]
    assert titles == ["Speed: gpu/family", "Speed: gpu/widths", "Not drawn"]
    forward = bars(page)["forward"]
    assert forward.unit == "TFLOP/s"
    assert {group.name: dict(group.values) for group in forward.groups} == {
        "causal": {"kgen": 600.0, "flex": 300.0},
        "full": {"kgen": 700.0, "sdpa": 350.0},
    }
    by_width = bars(page)["w, forward"]
    assert [group.name for group in by_width.groups] == ["8 x 1", "8 x 2, in a graph"]
    read = Read(html(page))
    assert "GPU, torch 2" in read.text
    assert "gpu/other.json" in read.text
    assert HOSTILE in assert_harmless(html(page)).text, "why a peer has no time"


def test_a_file_that_is_no_json(specs: list[Loaded], generated: Path, tmp_path: Path) -> None:
    bench(tmp_path / "benchmarks", "broken.json", "{")
    with pytest.raises(KgenError, match="not JSON"):
        record(specs, generated, tmp_path / "benchmarks")


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str], generated: Path) -> None:
    output = tmp_path / "deep/report.html"
    spec = str(ROOT / "specs/causal.yaml")
    with pytest.raises(SystemExit) as caught:
        app(
            [
                "report",
                spec,
                "-o",
                str(output),
                "--generated",
                str(generated),
                "--benchmarks",
                str(tmp_path),
            ]
        )
    assert caught.value.code == 0
    said = f"{output.as_posix()} written: 1 specs, 2 files: 1 verified, 1 missing\n"
    assert capsys.readouterr() == (said, "")
    assert output.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_what_is_checked_in(tmp_path: Path) -> None:
    """All of it is drawn: every file of reports has a section, but those that a family's file
    repeats.
    """
    page = record([load(ROOT / "specs/causal.yaml")], ROOT / "generated", ROOT / "benchmarks")
    drawn = {
        section.title.rpartition("/")[2]
        for section in page.sections
        if section.title.startswith("Speed")
    }
    assert {"attention", "norm", "chunk_output", "attention-shapes"} <= drawn
    assert "causal" not in drawn
