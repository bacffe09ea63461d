"""Kernels for one chip next to an emitted file: run in their interpreter on the CPU, or reported as
not run.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.interpreters.own_process import verified

from kgen.kernels.attention.schedules import CHIPS
from kgen.spec.load import load
from kgen.verify.emitted import emitted_files
from kgen.verify.events import Ended, Event, LeftOut, Ran
from kgen.verify.families import problem_of
from kgen.verify.found import Found, OfChip

ROOT = Path(__file__).resolve().parents[2]
FOUND = "hopper-one"
RIGHT = "        acc = warpgroup_mma_wait(0, deps=[acc_async])"


@pytest.fixture
def generated(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "generated/causal_d64", tmp_path / "causal_d64")
    return tmp_path


def run(generated: Path, name: str, *cases: str) -> tuple[list[dict[str, Any]], list[str], Ended]:
    """Return the rows of some cases, the files that were not run, and the end of the run."""
    heard: list[Event] = []
    rows = verified(
        [load(ROOT / f"specs/{name}.yaml")], generated, "cpu", cases=cases, hear=heard.append
    )
    left_out = [
        f"{event.file.path.name} {event.why}" for event in heard if isinstance(event, LeftOut)
    ]
    (end,) = (event for event in heard if isinstance(event, Ended))
    return rows, left_out, end


def test_small_cases_run(generated: Path, verdict: Any) -> None:
    verdict(problem_of(load(ROOT / "specs/causal_d64.yaml")), generated)
    rows, left_out, told = run(generated, "causal_d64", "one", FOUND)
    assert {(row["pass"], row["case"], row["ok"]) for row in rows} == {
        (group, case, True) for group in ("forward", "backward") for case in ("one", FOUND)
    }
    assert left_out == []
    assert told.ran == (
        Ran("triton.py", 2, "cases in Triton's interpreter"),
        Ran("hopper.py", 2, "small cases in the Gluon interpreter"),
    )


def test_a_wrong_kernel_for_hopper_is_found(generated: Path, verdict: Any) -> None:
    path = generated / "causal_d64/hopper.py"
    text = path.read_text()
    assert RIGHT in text
    path.write_text(text.replace(RIGHT, f"{RIGHT} * 1.5"))
    verdict(problem_of(load(ROOT / "specs/causal_d64.yaml")), generated)
    rows, _, _ = run(generated, "causal_d64", "one", "hopper-whole")
    wrong = {(row["pass"], row["case"]) for row in rows if not row["ok"]}
    assert ("forward", "hopper-whole") in wrong
    assert not any(case == "one" for _, case in wrong)


def test_kernels_for_other_tritons_are_not_run(generated: Path, verdict: Any) -> None:
    path = generated / "causal_d64/triton.py"
    text = path.read_text()
    line = next(x for x in text.splitlines() if x.startswith("GLUON_TRITONS = "))
    path.write_text(text.replace(line, "GLUON_TRITONS = ((1, 2),)"))
    verdict(problem_of(load(ROOT / "specs/causal_d64.yaml")), generated)
    rows, left_out, told = run(generated, "causal_d64", "one", FOUND)
    assert {row["case"] for row in rows} == {"one"}
    assert left_out == ["hopper.py takes Triton 1.2"]
    assert [ran.file for ran in told.ran] == ["triton.py"]


@pytest.mark.parametrize("because", ["", "the compute capability of the device is not 9.0"])
def test_a_gpu_says_why_it_does_not_run_them(because: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kgen.kernels.attention.schedules.hopper.verify import unused

    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    module: Any = ModuleType("emitted")
    module._portable_because = lambda device: because
    why = unused(module)
    assert why == (f"does not serve: {because}" if because else None)
    (file,) = (
        one for one in emitted_files(ROOT / "generated", load(ROOT / "specs/causal_d64.yaml"))
    )
    found = Found(file, chips=tuple(OfChip(chip, ()) for chip in CHIPS))
    found.add([{"unused": why, "file": "hopper.py"}])
    left_out = [(beside.path.name, reason) for beside, reason in found.not_run()]
    assert left_out == ([("hopper.py", why)] if because else [])


def test_each_chip_has_its_own_reason() -> None:
    (file,) = emitted_files(ROOT / "generated", load(ROOT / "specs/causal_d64.yaml"))
    (hopper,) = CHIPS
    others = [replace(hopper, file=f"{name}.py") for name in ("ran", "unused", "unrun")]
    found = Found(file, chips=tuple(OfChip(chip, (chip.file,)) for chip in others))
    found.where = {"device": "cpu"}
    rows: list[dict[str, Any]] = [
        {"unused": None, "file": "ran.py"},
        {"unused": "is for another chip", "file": "unused.py"},
        {"pass": "forward", "case": "one"},
        {"pass": "forward", "case": "ran.py"},
        {"pass": "forward", "case": "unrun.py", "unrun": "launched nothing"},
    ]
    found.add(rows)
    found.leave_out_unrun()
    assert {beside.path.name: why for beside, why in found.not_run()} == {
        "unused.py": "is for another chip",
        "unrun.py": "launched nothing",
    }
    assert [(ran.file, ran.cases) for ran in found.ran()] == [("triton.py", 1), ("ran.py", 1)]


def test_kernels_that_no_case_launched_are_not_run(tmp_path: Path, verdict: Any) -> None:
    shutil.copytree(ROOT / "generated/pair_bias", tmp_path / "pair_bias")
    verdict(problem_of(load(ROOT / "specs/pair_bias.yaml")), tmp_path)
    # TMA cannot load a row of one number
    rows, left_out, _ = run(tmp_path, "pair_bias", "one", FOUND)
    assert {row["case"] for row in rows} == {"one"}
    assert left_out == ["hopper.py does not serve the tensors of any small case"]
