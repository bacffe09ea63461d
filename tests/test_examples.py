"""The examples run on the CPU with the kernels in `generated/`, and print the expected numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest
from conftest import ROOT

from kgen.spec.load import load
from kgen.verify.families import problem_of
from kgen.verify.interpreter import ENVIRONMENT


def said(
    example: str, specs: tuple[str, ...], arguments: tuple[str, ...], verdict: Any
) -> list[float]:
    """Return the number at the end of each line that an example prints."""
    path = ROOT / "examples" / example
    folders = [ROOT / "generated" / spec for spec in specs]
    verdict(problem_of(load(ROOT / "specs" / f"{specs[0]}.yaml")), path.read_text(), *folders)
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(path),
        "--generated",
        str(ROOT / "generated"),
        *arguments,
    ]
    run = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [float(number) for number in re.findall(r"([\d.]+)$", run.stdout, re.MULTILINE)]


def test_a_layer_trains(verdict: Any) -> None:
    arguments = ("--length", "16", "--steps", "4")
    losses = said("train_layer.py", ("causal_d64", "rms_norm"), arguments, verdict)
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.6 * losses[0]


def test_paged_decoding(verdict: Any) -> None:
    """Lengths end inside a page, at its end, and in the next page."""
    arguments = ("--lengths", "3", "63", "70", "--steps", "2")
    worst = said("paged_decoding.py", ("decode_paged",), arguments, verdict)
    assert len(worst) == 2
    assert max(worst) < 0.02


def test_a_serving_engine(verdict: Any) -> None:
    """A prompt is longer than the window and than a step, and the third request waits for pages."""
    arguments = ("--prompts", "3", "40", "9", "--new", "3", "--budget", "16")
    more = ("--sequences", "2", "--pages", "4")
    same = said("serving_engine.py", ("serve_window_fp8",), (*arguments, *more), verdict)
    assert same == [3, 3, 3]


def test_every_example_is_tested() -> None:
    texts = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for path in (ROOT / "examples").glob("*.py"):
        assert path.name in texts, path.name


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem
)
def test_an_example_says_how_to_run_it(path: Any) -> None:
    text = path.read_text()
    assert re.search(rf"^    (python|torchrun .*) ?examples/{path.name}$", text, re.MULTILINE), path
    specs = re.findall(r"^    kgen (?:render|adapt) ([\w ]+?)(?: --.*)?$", text, re.MULTILINE)
    assert specs
    assert all((ROOT / "specs" / f"{name}.yaml").is_file() for name in specs[0].split())
