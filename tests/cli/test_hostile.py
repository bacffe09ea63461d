"""Hostile specs end with exit code 2, file, line and column, quickly and in little memory.

Nothing is written.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from support.running.measured import measured
from support.running.pace import pace, within
from support.specs.hostile import CASES, FIRST, Hostile

from kgen.cli import app

SECONDS, BYTES = 1.0, 1 << 30
STARTING = 2.0
"""Start-up time of the command in seconds. The import of sympy takes half a second, and more on a
busy machine.
"""
PLACED = re.compile(r"^ *--> .*\.yaml:[1-9]\d*:[1-9]\d*$", re.MULTILINE)


def check(code: object, out: str, err: str, folder: Path, spec: Path) -> None:
    assert code == 2, err
    assert out == ""
    assert err.startswith("error["), err
    assert "Traceback" not in err
    assert len(PLACED.findall(err)) == err.count("error["), err
    assert err.count("hint: ") >= err.count("error["), err
    assert all(c.isprintable() or c == "\n" for c in err)
    assert os.listdir(os.fsencode(folder)) == [os.fsencode(spec.name)], "something was written"


def in_process(case: Hostile, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = case.put(folder)
    with within(SECONDS), pytest.raises(SystemExit) as caught:
        app(["render", str(spec)], prog_name="kgen")
    check(caught.value.code, *capsys.readouterr(), folder, spec)


def in_a_process(case: Hostile, folder: Path) -> None:
    spec = case.put(folder)
    slowness = pace()
    used = measured([sys.executable, "-m", "kgen", "render", os.fsencode(spec)], folder)
    check(used.code, used.out, used.err, folder, spec)
    assert used.seconds < (STARTING + SECONDS) * max(slowness, pace())
    assert used.bytes < BYTES


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_there_are_enough() -> None:
    assert len(CASES) >= 300
    assert len(FIRST) >= 40


@pytest.mark.parametrize("case", FIRST, ids=lambda case: case.id)
def test_one_of_each_class(case: Hostile, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_process(case, folder, capsys)


@pytest.mark.thorough
@pytest.mark.parametrize("case", [case for case in CASES if case.number], ids=lambda case: case.id)
def test_all(case: Hostile, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_process(case, folder, capsys)


@pytest.mark.parametrize("kind", ["powers", "path_of_much", "yaml_alias_bombs"])
def test_a_command(kind: str, folder: Path) -> None:
    in_a_process(next(case for case in FIRST if case.kind == kind), folder)


@pytest.mark.thorough
@pytest.mark.parametrize("case", FIRST, ids=lambda case: case.id)
def test_commands(case: Hostile, folder: Path) -> None:
    in_a_process(case, folder)
