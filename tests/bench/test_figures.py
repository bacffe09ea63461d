"""The files in `benchmarks/`: `benchmarks/README.md` states which script writes each, and none is
there twice.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
FIGURES = sorted(path for path in FOLDER.rglob("*") if path.suffix in (".json", ".png"))


def called(path: Path) -> set[str]:
    """The names under which the README may list a file."""
    name = path.relative_to(FOLDER).as_posix()
    return {name, re.sub("^[^/]+/", "<device>/", name)}


def test_the_readme_lists_every_file_and_every_script() -> None:
    listed = set(re.findall(r"`([\w<>./-]+\.(?:json|png|py))`", README.replace(" --plot`", "`")))
    assert [path.name for path in FIGURES if not called(path) & listed] == []
    scripts = {f"benchmarks/{path.name}" for path in FOLDER.glob("*.py")}
    assert {name for name in listed if name.endswith(".py")} == scripts


def test_the_readme_lists_no_file_that_is_gone() -> None:
    rows = re.findall(r"^\| (.*?) \|", README, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert listed - {name for path in FIGURES for name in called(path)} == set()


def test_no_report_is_there_twice() -> None:
    """Reports of one spec are those of the family's file."""
    first: dict[str, str] = {}
    for path in (path for path in FIGURES if path.suffix == ".json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        for report in found.get("reports", [found]) if isinstance(found, dict) else [found]:
            other = first.setdefault(json.dumps(report, sort_keys=True), path.name)
            assert other == path.name, f"{path.name} repeats a report of {other}"
