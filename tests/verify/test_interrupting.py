"""`kgen verify` in a process of its own, interrupted by a signal while a case runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kgen.render.project import find_specs, render_all, together
from kgen.render.writer import apply, compute_changes

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
SPEC = (
    "kernel: norm\nname: {}\nnorm: rms\ndtype: bf16\nwidth: 256\npasses: [forward]\n"
    "targets: {{triton: {{}}}}\n"
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a spec whose cases end, and one with a case that does not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "specs").mkdir()
    for name in ("ends", "waits"):
        (tmp_path / f"specs/{name}.yaml").write_text(SPEC.format(name))
    outputs, _ = together(render_all(find_specs([]), Path("generated")))
    apply(compute_changes(outputs, Path("generated")))
    return tmp_path


def start(*arguments: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(map(str, (ROOT, HERE)))
    command = [
        sys.executable,
        str(HERE / "slow_worker.py"),
        "verify",
        "--device",
        "cpu",
        "-j",
        "1",
        *arguments,
    ]
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def until(process: subprocess.Popen[str], words: str) -> list[str]:
    """The lines that the process prints, up to one with these words."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if words in line:
            return lines
    raise AssertionError(
        f"{lines}, and on stderr {process.stderr.read() if process.stderr else ''}"
    )


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.thorough), signal.SIGTERM],
    ids=lambda x: x.name,
)
def test_results_are_printed_at_once_and_kept(number: signal.Signals, project: Path) -> None:
    process = start("--record")
    lines = until(process, "waits                 triton     forward   plain")
    assert lines[0].split()[:5] == ["spec", "target", "pass", "case", "ok"]
    assert [line.split()[0] for line in lines[1:-1]] == ["ends"] * (len(lines) - 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    ran, last = out.splitlines()
    count = len(lines) - 1
    assert ran == f"triton.py: {count} cases in Triton's interpreter"
    # The other spec has as many cases.
    assert last == (
        f"{count} right, 0 failed, {count - 2} not run: interrupted; recorded in "
        "generated/verified.json"
    )
    (entry,) = json.loads(Path("generated/verified.json").read_text())["files"].values()
    assert entry["file"] == "ends/triton.py"
    (record,) = entry["records"].values()
    assert record["cases"] == count - 1
