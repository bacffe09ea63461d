"""`kgen verify --sanitizer` with a stand-in for compute-sanitizer that runs its command."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from kgen.diagnostics import KgenError, MissingError
from kgen.render.rendering import render_spec
from kgen.spec.load import Loaded, load, loads
from kgen.verify import call, interpreter, ledger
from kgen.verify.families import problem_of
from kgen.verify.options import RunOptions
from kgen.verify.sanitizing import sanitize_specs
from kgen.verify.worker import Job

ROOT = Path(__file__).parents[2]

SPEC = (
    "kernel: chunk_output\nname: sample\ndtype: bf16\nhead_dim: 64\nchunk_size: 16\n"
    "passes: [forward]\n"
)
TOOL = """#!/bin/sh
while [ "$1" != --log-file ]; do echo "$1" >> {folder}/options; shift; done
log=$2; shift 2
"$@" || exit $?
echo "========= COMPUTE-SANITIZER" > $log
{report}
"""


@pytest.fixture
def sample(tmp_path: Path) -> Loaded:
    loaded = loads(SPEC, "sample.yaml")
    (tmp_path / "generated" / "sample").mkdir(parents=True)
    for name, text in render_spec(loaded).items():
        (tmp_path / "generated" / "sample" / name).write_text(text)
    return loaded


def sanitized(sample, tmp_path, monkeypatch, report, tool="racecheck", **more):
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir(exist_ok=True)
    program.write_text(TOOL.format(folder=tmp_path, report=report))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    options = RunOptions("cpu", record=True, **more)
    return sanitize_specs([sample], tmp_path / "generated", [tool], options)


def test_clean_then_not(sample, tmp_path, monkeypatch):
    """The ledger records a clean file until a tool reports an error. `kgen status` does not count
    it as verified.
    """
    generated = tmp_path / "generated"
    clean = 'echo "========= RACECHECK SUMMARY: 0 hazards displayed" >> $log'
    (row,) = sanitized(sample, tmp_path, monkeypatch, clean)
    assert (row["spec"], row["target"], row["tool"]) == ("sample", "triton", "racecheck")
    assert row["ok"], row["message"]
    assert (tmp_path / "options").read_text().split()[:2] == ["--tool", "racecheck"]
    (entry,) = json.loads((generated / ledger.FILENAME).read_text())["files"].values()
    assert list(entry["records"]) == ["racecheck interpreter"]
    assert ledger.status([sample], generated)[0]["state"] == "unrecorded"

    found = 'echo "========= Error: Race reported" >> $log; exit 86'
    (row,) = sanitized(sample, tmp_path, monkeypatch, found)
    assert not row["ok"]
    assert row["message"] == "Error: Race reported"
    assert json.loads((generated / ledger.FILENAME).read_text())["files"] == {}


def test_a_call_that_fails_or_says_nothing_is_not_clean(sample, tmp_path, monkeypatch):
    (row,) = sanitized(sample, tmp_path, monkeypatch, "")
    assert row["message"] == "the tool ended without a summary"
    emitted = tmp_path / "generated" / "sample" / "triton.py"
    emitted.write_text(emitted.read_text() + "\nraise RuntimeError('broken')\n")
    (row,) = sanitized(sample, tmp_path, monkeypatch, "echo SUMMARY >> $log")
    assert not row["ok"]
    assert "broken" in row["message"]


@pytest.mark.parametrize(("tool", "portable"), [("racecheck", True), ("memcheck", False)])
def test_racecheck_looks_at_the_portable_kernels(tool, portable, monkeypatch):
    path = ROOT / "generated" / "causal" / "triton.py"
    q = torch.zeros(1, 1, 128, 128, dtype=torch.bfloat16)
    asked = []

    def example(subject, name):
        monkeypatch.setattr(subject.module, "_portable_because", lambda device: "")
        asked.append(not subject.module._on_hopper(q, q, q))
        return mock.Mock(run=mock.Mock(return_value={}))

    monkeypatch.setattr(call, "family_of", lambda problem: mock.Mock(example=example))
    problem = problem_of(load(ROOT / "specs" / "causal.yaml"))
    file = mock.Mock(path=path, target="triton", stem="triton")
    monkeypatch.setattr(interpreter, "mend", lambda: None)
    call.main(Job(problem, file, "cpu", (("call", tool),)), io.StringIO())
    assert asked == [portable]


def test_what_is_missing(sample, tmp_path, monkeypatch):
    with pytest.raises(KgenError, match="no tool `racechek`"):
        sanitize_specs([sample], tmp_path / "generated", ["racechek"])
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingError, match="not on the PATH"):
        sanitize_specs([sample], tmp_path / "generated", ["racecheck"])
    with pytest.raises(KgenError, match="no file has the target cute"):
        sanitized(sample, tmp_path, monkeypatch, "", targets=["cute"])
