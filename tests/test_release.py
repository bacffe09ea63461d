"""Facts of a release: one version everywhere, and workflows that call existing scripts."""

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
FRAGMENTS = ROOT / "changelog.d"
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_one_version() -> None:
    (project,) = re.findall(
        r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    cited = YAML(typ="safe").load((ROOT / "CITATION.cff").read_text())["version"]
    assert project == cited == __version__


def test_the_changelog_has_the_version() -> None:
    """The newest entry has the present version.

    At a release it has a date, and no fragments are left.
    """
    text = (ROOT / "CHANGELOG.md").read_text()
    newest, state = re.findall(r"^## \[([^\]]+)\] - (.*)$", text, re.MULTILINE)[0]
    assert newest == __version__
    if tagged := os.environ.get("KGEN_RELEASE"):
        assert tagged == __version__
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", state)
        assert [path.name for path in FRAGMENTS.iterdir()] == ["README.md"]


def test_fragments_of_the_changelog_can_be_assembled() -> None:
    assert "## [" in draft(ROOT)


def test_a_fragment_of_each_category_is_assembled(tmp_path: Path) -> None:
    """The categories of changelog.d/README.md are towncrier's. Other names are errors."""
    config = (ROOT / "pyproject.toml").read_text().replace('package = "kgen"', 'version = "1.2.3"')
    (tmp_path / "pyproject.toml").write_text(config)
    folder = tmp_path / FRAGMENTS.name
    folder.mkdir()
    categories = re.findall(r"^\| `(\w+)` \|", (FRAGMENTS / "README.md").read_text(), re.MULTILINE)
    for category in categories:
        (folder / f"+one.{category}.md").write_text(f"Text of {category}.\n")
    text = draft(tmp_path)
    assert "## [1.2.3] - " in text
    assert re.findall(r"^### .*\n\n- Text of (\w+)\.$", text, re.MULTILINE) == categories
    (folder / "+one.other.md").write_text("Text.\n")
    with pytest.raises(subprocess.CalledProcessError):
        draft(tmp_path)


def draft(folder: Path) -> str:
    """Return the output of `towncrier build --draft` for a project."""
    command = [sys.executable, "-m", "towncrier", "build", "--draft"]
    run = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=60, check=True
    )
    return run.stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_is_there(path: Path) -> None:
    """Workflows call existing scripts, and each job has a time limit."""
    jobs = YAML(typ="safe").load(path.read_text())["jobs"]
    for job in jobs.values():
        assert job["timeout-minutes"] <= 30
        for command in (step["run"] for step in job["steps"] if "run" in step):
            for named in re.findall(r"\bscripts/\w+", command):
                assert os.access(ROOT / named, os.X_OK), named
            assert "pytest" not in command, "what tests need is installed by scripts/setup alone"


def test_a_release_is_tested_and_tried() -> None:
    """A release runs the scripts that the README and tests/test_wheel.py describe."""
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
    named = set(re.findall(r"kgen-kernels\[(\w+)\]", text)) | set(
        re.findall(r"the extra `(\w+)`", text)
    )
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
