"""Temporary project, in which the command runs as a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.specs.stand_in_command import TEMPLATES

ROOT = Path(__file__).resolve().parents[1]
STANDIN = Path(__file__).parent / "support/specs/stand_in_command.py"
pytest_plugins = ["support.running.verdicts", "pytester"]


@dataclass(frozen=True)
class Result:
    """Result of a run of the command."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        return self.out.splitlines()[-1]


@dataclass(frozen=True)
class Project:
    """A folder with `specs/` and `templates/` in which `kgen` runs with stand-ins."""

    root: Path

    def spec(self, name: str, text: str = "", *, file: str | None = None) -> Path:
        path = self.root / "specs" / f"{file or name}.yaml"
        path.write_text(f"name: {name}\n{text}", encoding="utf-8")
        return path

    def file(self, path: str) -> Path:
        return self.root / "generated" / path

    def tree(self) -> dict[str, tuple[bytes, int]]:
        """Return the content and modification time of every file under generated/."""
        base = self.root / "generated"
        files = [path for path in sorted(base.rglob("*")) if path.is_file()]
        return {
            p.relative_to(base).as_posix(): (p.read_bytes(), p.stat().st_mtime_ns) for p in files
        }

    def start(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(ROOT), str(STANDIN.parent)])
        return subprocess.Popen(
            [sys.executable, str(STANDIN), *arguments],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": path, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def kgen(self, *arguments: str, env: Mapping[str, str] | None = None) -> Result:
        process = self.start(*arguments, env=env)
        out, err = process.communicate(timeout=60)
        return Result(process.returncode, out, err)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    for folder in ("specs", "templates"):
        (tmp_path / folder).mkdir()
    for name, text in TEMPLATES.items():
        (tmp_path / "templates" / name).write_text(text, encoding="utf-8")
    return Project(tmp_path)
