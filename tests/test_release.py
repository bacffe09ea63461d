"""What a release says of itself: one version everywhere, and workflows that run what is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from kgen import __version__

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_one_version() -> None:
    (project,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    cited = YAML(typ="safe").load((ROOT / "CITATION.cff").read_text())["version"]
    assert project == cited == __version__


def test_the_changelog_has_the_version() -> None:
    """The newest entry is of this version; before it is released, what is unreleased says that it prepares it."""
    text = (ROOT / "CHANGELOG.md").read_text()
    newest, body = re.findall(r"^## \[([^\]]+)\][^\n]*\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[0]
    if tagged := os.environ.get("KGEN_RELEASE"):
        assert (newest, tagged) == (__version__, __version__)
    else:
        assert newest == __version__ or (
            newest == "Unreleased" and f"{__version__} is in preparation" in body
        )


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_is_there(path: Path) -> None:
    """What they run in the repository is a script of it, and each job ends by itself."""
    jobs = YAML(typ="safe").load(path.read_text())["jobs"]
    for job in jobs.values():
        assert job["timeout-minutes"] <= 30
        for command in (step["run"] for step in job["steps"] if "run" in step):
            for named in re.findall(r"\bscripts/\w+", command):
                assert os.access(ROOT / named, os.X_OK), named
            assert "pytest" not in command, "what tests need is installed by scripts/setup alone"


def test_a_release_is_tested_and_tried() -> None:
    """By the commands that are tried here: the README's, and the one of tests/test_wheel.py."""
    jobs = YAML(typ="safe").load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    commands = [step["run"] for step in jobs["wheel"]["steps"] if "run" in step]
    assert [command.split()[-1] for command in commands] == ["scripts/test", "scripts/wheel"]
    assert jobs["publish"]["needs"] == "wheel"


def test_hints_name_extras_that_there_are() -> None:
    metadata = (ROOT / "pyproject.toml").read_text()
    (table,) = re.findall(
        r"^\[project\.optional-dependencies\]\n(.*?)^\[", metadata, re.MULTILINE | re.DOTALL
    )
    extras = set(re.findall(r"^(\w+) = \[", table, re.MULTILINE))
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("kgen/**/*.py")]
    text = "\n".join(path.read_text() for path in pages)
    named = set(re.findall(r"kgen-kernels\[(\w+)\]", text)) | set(re.findall(r"the extra `(\w+)`", text))
    assert {"verify", "prove"} <= named <= extras


def test_the_site_is_built(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr[-2000:]
    home = (tmp_path / "index.html").read_text()
    assert 'href="files/generated/causal_alibi/triton.py"' in home
    assert (tmp_path / "files/generated/causal_alibi/triton.py").is_file()
    assert (tmp_path / "pictures/speed.svg").is_file()
    loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="([^"]+)"', home)
    assert loaded
    assert not [place for place in loaded if "//" in place], "a page needs nothing from elsewhere"
