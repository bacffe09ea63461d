"""Comparison of emitted kernels with float64 in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kgen.render.rendering import render_spec
from kgen.spec.load import load
from kgen.verify.families import family_of, problem_of
from kgen.verify.worker import case_names
from support.interpreters.own_process import verified

ROOT = Path(__file__).resolve().parents[3]
CORNERS = sorted((ROOT / "tests/specs").glob("*.yaml"))
"""Specs of all families with features that no stock spec has."""


def of_family(family: str, paths: list[Path]) -> list[Path]:
    """Return the specs that belong to a family."""
    return [path for path in paths if f"kernel: {family}\n" in path.read_text()]


def assert_right(path: Path, folder: Path, verdict: Any, step: int = 1) -> None:
    """Verify a sample of the cases of a spec, unless the verdict is on record."""
    loaded = load(path)
    (folder / loaded.spec.name).mkdir()
    for name, text in render_spec(loaded).items():
        (folder / loaded.spec.name / name).write_text(text)
    problem = problem_of(loaded)
    verdict(problem, folder)
    names = dict.fromkeys(
        name
        for group in family_of(problem).groups(problem)
        for name in case_names(problem, group, "cpu", True)
    )
    cases = [name for i, name in enumerate(names) if i % step == 0 or name == "ints-wide"]
    rows = verified([loaded], folder, device="cpu", timeout=120.0, cases=cases)
    passes = {"forward", "backward"} if "backward" in loaded.spec.passes else {"forward"}
    assert {row["pass"] for row in rows} == passes
    wrong = [f"{row['pass']} {row['case']}: {row['message']}" for row in rows if not row["ok"]]
    assert not wrong, "\n".join(wrong)
