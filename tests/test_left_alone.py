"""Formatters and linters of the repository that an emitted file is checked into leave it as it
is.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from support.interpreters.single_file import single
from support.running.linting import findings

ROOT = Path(__file__).resolve().parents[1]


def test_emitted_files_are_left_alone(tmp_path: Path) -> None:
    one_file = tmp_path / "causal_alibi.py"
    one_file.write_text(single(ROOT / "specs/causal_alibi.yaml"))
    assert not findings([ROOT / "generated", one_file])


def test_without_its_header_a_file_is_not(tmp_path: Path) -> None:
    path = Path(shutil.copy(ROOT / "generated/causal_alibi/triton.py", tmp_path))
    path.write_text(path.read_text().replace("# fmt: off\n", "").replace("# ruff: noqa\n", ""))
    found = findings([path])
    assert "reformat" in found
    assert "Found" in found
