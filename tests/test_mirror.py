"""Tests are in `tests/<package>/` for `kgen/<package>/`, and every named test exists."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = sorted(path.relative_to(ROOT / "tests") for path in ROOT.glob("tests/**/test_*.py"))
OF_THE_REPOSITORY = {
    "architecture": "imports of all of kgen",
    "comparing": "tests/fuzzing, of expressions",
    "copies": "emitted files of every family, twice in a process",
    "corners": "specs of every family, as text",
    "derivatives": "emitted files of every family, called",
    "docs": "pages",
    "examples": "examples/, run",
    "exported_folders": "emitted folders of several families, exported and loaded",
    "files": "kgen/files.py, which is in no package",
    "fuzzing": "tests/fuzzing",
    "growing": "from spec to text, through every stage",
    "large": "tests/on_gpu/large.py",
    "line_lengths": "emitted files of every family, as text",
    "left_alone": "emitted files of every family, as other tools see them",
    "loops": "tests/support/interpreters/loops.py",
    "mirror": "tests",
    "mistakes": "emitted files of every family, run",
    "mutating": "tests/mutating",
    "plain_words": "the language of pages, docstrings, comments and help texts",
    "random_proofs": "tests/fuzzing",
    "recipes": "CONTRIBUTING.md, followed in a copy",
    "repeating": "tests/on_gpu/repeating.py",
    "sampling": "tests/support/running/sampling.py",
    "sensitivity": "emitted files of every family, run",
    "settings": "kgen/settings.py, which is in no package",
    "release": "the project as others meet it: versions, workflows, the site",
    "signatures": "emitted files of every family, as their callers see them",
    "tutorial": "docs/tutorial.md, followed in a folder",
    "unused": "emitted files of every family, as text",
    "verdicts": "tests/support/running/verdicts.py",
    "waiting": "emitted files of every family, run",
    "wheel": "the distribution",
}
"""Tests of no package, with their subjects."""


def packages(where: Path) -> set[str]:
    return {path.parent.relative_to(where).as_posix() for path in where.glob("**/__init__.py")}


def test_tests_lie_where_what_they_test_lies() -> None:
    folders = {path.parent.as_posix() for path in TESTS}
    assert folders <= packages(ROOT / "kgen")
    assert {path.stem.removeprefix("test_") for path in TESTS if len(path.parts) == 1} == set(
        OF_THE_REPOSITORY
    )


def test_every_package_has_tests() -> None:
    stages = {place.partition("/")[0] for place in packages(ROOT / "kgen")} - {".", "kernels"}
    families = {place for place in packages(ROOT / "kgen") if re.fullmatch(r"kernels/\w+", place)}
    assert stages | families <= {path.parent.as_posix() for path in TESTS}


def test_every_test_is_collected(pytestconfig: pytest.Config) -> None:
    """`pytest` without arguments collects each folder and each file of tests."""
    never, files, roots = (
        pytestconfig.getini(name) for name in ("norecursedirs", "python_files", "testpaths")
    )
    assert roots == ["tests"]
    passed_over = {
        path.as_posix()
        for path in TESTS
        if any(fnmatch(part, pattern) for part in path.parts[:-1] for pattern in never)
        or not any(fnmatch(path.name, pattern) for pattern in files)
    }
    assert passed_over == set()


def test_helpers_lie_in_folders() -> None:
    """`tests/` itself contains only tests, the files that pytest reads, and the records of these
    tests.
    """
    top = {path.name for path in ROOT.glob("tests/*") if path.is_file()} - {
        path.name for path in TESTS
    }
    assert top == {
        "conftest.py",
        "corners.json",
        "plain_words.json",
        "signatures.json",
        "verdicts.json",
    }
    groups = {
        path
        for path in ROOT.glob("tests/support/*")
        if path.is_dir() and path.name != "__pycache__"
    }
    assert [path.name for path in ROOT.glob("tests/support/*.py")] == ["__init__.py"]
    assert {path for path in groups if not (path / "__init__.py").exists()} == set()


def test_tests_that_are_named_are_there() -> None:
    """Named test files exist.

    The changelog tells history, and tests/test_verdicts.py has a made-up project, so both are
    exempt.
    """
    places = (
        "*.md",
        "docs/**/*.md",
        "kgen/**/*.py",
        "tests/**/*.py",
        "scripts/*",
        ".ci/*",
        "pyproject.toml",
    )
    texts = {path for place in places for path in ROOT.glob(place)}
    gone = {
        f"{path.relative_to(ROOT)}: {named}"
        for path in texts - {ROOT / "CHANGELOG.md", ROOT / "tests/test_verdicts.py"}
        for named in re.findall(r"\btests/[\w/]*\w+\.\w+", path.read_text(encoding="utf-8"))
        if not (ROOT / named).exists()
    }
    assert gone == set()


def test_one_command_updates_all_that_tests_have_on_record() -> None:
    update = (ROOT / "scripts/update").read_text(encoding="utf-8")
    own = Path(__file__).name
    golden = {
        f"tests/{path.as_posix()}"
        for path in TESTS
        if path.name != own
        and "KGEN_UPDATE_GOLDEN" in (ROOT / "tests" / path).read_text(encoding="utf-8")
    }
    assert set(re.findall(r"tests/\S+\.py", update)) == golden
