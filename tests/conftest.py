"""A temporary project, and the command run in it as a process of its own."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from standin import TEMPLATES

ROOT = Path(__file__).resolve().parents[1]
STANDIN = Path(__file__).with_name("standin.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="the tests marked `thorough`, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Continuous integration runs a fixed sample; what is marked `thorough` waits for `scripts/test --all`."""
    if config.getoption("--all"):
        return
    left_out = [item for item in items if item.get_closest_marker("thorough")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("thorough")]


VERDICTS = Path(__file__).with_name("verdicts.json")
"""What `scripts/test --all` found right: the hash of what a test ran, by test."""


@pytest.fixture
def verdict(request: pytest.FixtureRequest) -> Callable[[str], contextlib.AbstractContextManager[bool]]:
    """`with verdict(text) as due`, for a test that takes too long for every change: whether it has to run.

    It does with `--all`, which records that it was right with this text. Otherwise that has to be on record.
    """

    @contextlib.contextmanager
    def of(text: str) -> Iterator[bool]:
        name, digest = request.node.nodeid.partition("::")[2], hashlib.sha256(text.encode()).hexdigest()
        if not request.config.getoption("--all"):
            known = json.loads(VERDICTS.read_text()).get(name)
            assert known == digest, (
                "what this test runs has changed: run `scripts/test --all`, commit tests/verdicts.json"
            )
            yield False
            return
        yield True
        with open(VERDICTS, "r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            found = json.load(file) | {name: digest}
            file.seek(0)
            file.write(json.dumps(found, indent=1, sort_keys=True) + "\n")
            file.truncate()

    return of


@dataclass(frozen=True)
class Result:
    """What a run of the command left behind."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        return self.out.splitlines()[-1]


@dataclass(frozen=True)
class Project:
    """A folder with `specs/` and `templates/` in which `kgen` runs on stand-ins."""

    root: Path

    def spec(self, name: str, text: str = "", *, file: str | None = None) -> Path:
        path = self.root / "specs" / f"{file or name}.yaml"
        path.write_text(f"name: {name}\n{text}", encoding="utf-8")
        return path

    def file(self, path: str) -> Path:
        return self.root / "generated" / path

    def tree(self) -> dict[str, tuple[bytes, int]]:
        """Every file under generated/ with what it holds and when it was written."""
        base = self.root / "generated"
        files = [path for path in sorted(base.rglob("*")) if path.is_file()]
        return {p.relative_to(base).as_posix(): (p.read_bytes(), p.stat().st_mtime_ns) for p in files}

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
