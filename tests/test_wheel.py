"""The wheel contains templates and specs, and renders the same files as the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytest.importorskip(
    "hatchling", reason="the wheel is built with hatchling, which is part of the dev extra"
)


def run(code: str, folder: Path, path: Path | None = None) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path or "")}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that contains only the wheel's files."""
    folder = tmp_path_factory.mktemp("wheel")
    run(f"from hatchling.build import build_wheel; build_wheel({str(folder)!r})", ROOT)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def test_wheel_holds_templates_specs_and_licence(installed: Path) -> None:
    for kind in ("templates", "specs"):
        ours = {
            p.relative_to(ROOT / kind): p.read_bytes()
            for p in (ROOT / kind).rglob("*")
            if p.is_file()
        }
        theirs = installed / "kgen/_data" / kind
        assert {
            p.relative_to(theirs): p.read_bytes() for p in theirs.rglob("*") if p.is_file()
        } == ours
    assert [p.name for p in installed.glob("*.dist-info/licenses/*")] == ["LICENSE"]


def test_wheel_renders_the_same(installed: Path, tmp_path: Path) -> None:
    root = run(
        "from kgen.render.environment import template_root; print(template_root())",
        tmp_path,
        installed,
    )
    assert Path(root.strip()) == installed / "kgen/_data/templates"
    spec = installed / "kgen/_data/specs/causal_alibi.yaml"
    code = (
        f"import sys; sys.argv[1:] = ['render', {str(spec)!r}]; from kgen.cli import main; main()"
    )
    run(code, tmp_path, installed)
    emitted = tmp_path / "generated/causal_alibi/triton.py"
    assert emitted.read_bytes() == (ROOT / "generated/causal_alibi/triton.py").read_bytes()


@pytest.mark.thorough
def test_the_wheel_is_all_that_a_user_needs(tmp_path: Path) -> None:
    """The wheel lists and renders its specs, in an empty environment with only its dependencies."""
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    command = [ROOT / "scripts/wheel", tmp_path]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "causal_alibi " in run.stdout
    assert "3 files rendered, 3 changed, 0 deleted" in run.stdout


def kgen(*arguments: str, folder: Path, installed: Path) -> str:
    code = f"import sys; sys.argv[1:] = {list(arguments)!r}; from kgen.cli import main; main()"
    return run(code, folder, installed)


@pytest.mark.thorough  # `scripts/wheel` renders one of them
def test_wheel_has_stock_specs_by_name(installed: Path, tmp_path: Path) -> None:
    names = sorted(path.stem for path in (ROOT / "specs").glob("*.yaml"))
    listed = kgen("list", "--builtin", "--format", "json", folder=tmp_path, installed=installed)
    assert [row["name"] for row in json.loads(listed)] == names
    explained = kgen("explain", "causal_alibi", folder=tmp_path, installed=installed)
    assert "slopes[h] * (kv_idx - q_idx)" in explained
    kgen("render", "causal_alibi", folder=tmp_path, installed=installed)
    made = tmp_path / "generated/causal_alibi"
    assert (made / "triton.py").read_bytes() == (
        ROOT / "generated/causal_alibi/triton.py"
    ).read_bytes()
    assert json.loads((made / "manifest.json").read_text())["spec"] == "builtin:causal_alibi"
    kgen("new", "mine", folder=tmp_path, installed=installed)
    assert (tmp_path / "specs/mine.yaml").is_file()
    kgen("render", "--check", "causal_alibi", folder=tmp_path, installed=installed)
