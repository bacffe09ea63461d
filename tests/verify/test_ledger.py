from __future__ import annotations

import json
import multiprocessing
import re
from pathlib import Path

import pytest
from support.specs.hand_built import plain, render

from kgen.diagnostics import KgenError
from kgen.render import header
from kgen.spec.user_text import UserText
from kgen.targets.triton.tritons import GLUON
from kgen.verify import ledger

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = {"python": "3.11.0", "torch": "2.11.0", "triton": "3.6.0"}
GPU = {"device": "NVIDIA H200", "capability": "9.0"}
CPU = {"device": ledger.INTERPRETER, "capability": ""}


def row(ok=True, error=1.23456e-3, pass_="forward", name="out"):
    return {"ok": ok, "pass": pass_, "case": "tile", "outputs": {name: [error, 0.5]}}


TOOLCHAIN = "torch 2.11.0, triton 3.6.0"


def enter(generated, path, rows, where=GPU, quick=False, toolchain=TOOLCHAIN):
    digest = ledger.file_hash(path)
    place = ledger.Where(versions=VERSIONS, toolchain=toolchain, **where)
    ledger.record(generated, path, digest, rows, place, quick=quick)


@pytest.fixture
def emitted(tmp_path):
    return render(plain(), tmp_path)


def state(generated):
    (found,) = ledger.status([plain()], generated)
    return found["state"], found["device"], found["error"]


def test_states(tmp_path):
    assert state(tmp_path) == ("missing", None, None)
    path = render(plain(), tmp_path)
    assert state(tmp_path) == ("unrecorded", None, None)
    enter(tmp_path, path, [row(), row(error=2e-3, pass_="backward", name="dq")])
    assert state(tmp_path) == ("verified", "NVIDIA H200", 2e-3)
    text = path.read_text()
    # a docstring is not part of the program
    path.write_text(text.replace('"""', '"""Anew. ', 1) + "\n")
    assert state(tmp_path) == ("verified", "NVIDIA H200", 2e-3)
    path.write_text(text + "x = 1\n")
    assert state(tmp_path) == ("stale", None, None)


def test_a_proof_is_no_result(tmp_path, emitted):
    digest = ledger.file_hash(emitted)
    proved = {"verdict": "proved", "kernel": "k", "message": ""}
    ledger.record_proved(tmp_path, emitted, digest, [proved], versions={"z3-solver": "4"})
    assert state(tmp_path)[0] == "unrecorded"
    emitted.write_text(emitted.read_text() + "x = 1\n")
    assert state(tmp_path)[0] == "unrecorded"


def test_a_text_after_one_that_was_compiled_is_stale(tmp_path, emitted):
    compiled = {"ok": True, "kernel": "k", "registers": 1, "spills": 0, "shared": 0}
    digest = ledger.file_hash(emitted)
    ledger.record_compiled(tmp_path, emitted, digest, [compiled], arch="sm_90", versions=VERSIONS)
    assert state(tmp_path)[0] == "compiled"
    emitted.write_text(emitted.read_text() + "x = 1\n")
    assert state(tmp_path)[0] == "stale"


def test_format_is_deterministic(tmp_path, emitted):
    enter(tmp_path, emitted, [row()])
    enter(tmp_path, emitted, [row()], CPU)
    text = (tmp_path / ledger.FILENAME).read_text()
    (entry,) = json.loads(text)["files"].values()
    assert entry["file"] == "plain/triton.py"
    assert list(entry["records"]) == [f"NVIDIA H200, {TOOLCHAIN}", f"interpreter, {TOOLCHAIN}"]
    assert entry["records"][f"NVIDIA H200, {TOOLCHAIN}"]["worst"] == {
        "out": {"error": 1.23e-3, "ratio": 0.5}
    }
    (tmp_path / ledger.FILENAME).unlink()
    enter(tmp_path, emitted, [row()], CPU)
    enter(tmp_path, emitted, [row()])
    assert (tmp_path / ledger.FILENAME).read_text() == text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plain", "verified.json"]


def test_an_interpreter_run_stands_beside_a_gpu_run(tmp_path, emitted):
    enter(tmp_path, emitted, [row()])
    enter(tmp_path, emitted, [row(error=0.5)], CPU)
    assert state(tmp_path) == ("verified", "NVIDIA H200", 1.23e-3)


def test_each_triton_has_a_record_of_its_own(tmp_path, emitted):
    newer = "torch 2.15.0, triton 3.9.0"
    enter(tmp_path, emitted, [row()])
    enter(tmp_path, emitted, [row(error=2e-3)], toolchain=newer)
    enter(tmp_path, emitted, [row(error=0.5)], CPU)
    (found,) = ledger.status([plain()], tmp_path)
    places = [f"NVIDIA H200, {TOOLCHAIN}", f"NVIDIA H200, {newer}", f"interpreter, {TOOLCHAIN}"]
    assert list(found["verified"].items()) == list(zip(places, [1.23e-3, 2e-3, 0.5], strict=True))
    assert (found["device"], found["error"]) == ("NVIDIA H200", 2e-3)
    enter(tmp_path, emitted, [row(ok=False)], toolchain=newer)
    (found,) = ledger.status([plain()], tmp_path)
    assert list(found["verified"]) == [places[0], places[2]]


ONLY_36 = (
    *("causal_row_max", "serve_causal", "serve_fp8"),
    *("gated_delta_rule", "gated_delta_net", "delta_rule", "deltanet_negative"),
)
"""Specs whose Hopper kernels ran only with Triton 3.6. docs/calls.md, docs/specs-serving.md and
docs/specs-linear-attention.md say so."""


def test_gluon_is_taken_from_tritons_of_the_ledger():
    """Hopper kernels run only with a Triton version that verified them.

    The newest and the oldest verified every spec that has such kernels, the others the specs of the
    first race.
    """
    verified: dict[tuple[int, ...], set[str]] = {}
    for entry in ledger.read(ROOT / "generated").values():
        for found in entry["records"].values():
            if (
                "worst" in found
                and "package" not in found
                and found["capability"] == "9.0"
                and not found["quick"]
            ):
                version = tuple(map(int, found["versions"]["triton"].split(".")[:2]))
                verified.setdefault(version, set()).add(entry["file"])
    hopper = [
        path for path in ROOT.glob("generated/*/triton.py") if "GLUON_TRITONS" in path.read_text()
    ]
    every = {path.relative_to(ROOT / "generated").as_posix() for path in hopper}
    every -= {f"{name}/triton.py" for name in ONLY_36}
    page = (ROOT / "docs/performance/attention.md").read_text()
    table = page.partition("<!-- speed -->")[2].partition("<!-- end -->")[0]
    first = {f"{name}/triton.py" for name in re.findall(r"^\| `(\w+)` \|", table, re.M)}
    assert len(first) > 10
    for version in GLUON:
        wanted = every if version in (GLUON[0], GLUON[-1]) else first
        assert not wanted - verified.get(version, set()), version


def test_a_failure_takes_the_claim_back(tmp_path, emitted):
    enter(tmp_path, emitted, [row()])
    enter(tmp_path, emitted, [row(), row(ok=False)])
    assert state(tmp_path)[0] == "unrecorded"
    assert ledger.read(tmp_path) == {}


def test_a_quick_run_does_not_replace_a_full_one(tmp_path, emitted):
    enter(tmp_path, emitted, [row()])
    enter(tmp_path, emitted, [row(error=9e-3)], quick=True)
    assert state(tmp_path)[2] == 1.23e-3


def test_compiled_is_not_verified(tmp_path, emitted):
    rows = [
        {"ok": True, "kernel": "_k", "registers": n, "spills": 0, "shared": 1024} for n in (90, 120)
    ]
    digest = ledger.file_hash(emitted)
    ledger.record_compiled(tmp_path, emitted, digest, rows, arch="sm_90", versions=VERSIONS)
    assert state(tmp_path) == ("compiled", None, None)
    records = ledger.read(tmp_path)[digest]["records"]
    assert records["compiled sm_90"]["kernels"] == {
        "_k": {"registers": 120, "spills": 0, "shared": 1024}
    }


def test_an_earlier_text_is_kept_until_the_present_one_ran_there(tmp_path, emitted):
    enter(tmp_path, emitted, [row()])
    enter(tmp_path, emitted, [row()], CPU)
    old = ledger.file_hash(emitted)
    emitted.write_text("# other\n")
    enter(tmp_path, emitted, [row(error=0.5)], CPU)
    (found,) = ledger.status([plain()], tmp_path)
    assert (found["state"], found["device"], found["error"]) == (
        "interpreted",
        ledger.INTERPRETER,
        0.5,
    )
    assert found["earlier"] == [f"NVIDIA H200, {TOOLCHAIN}"]
    assert list(ledger.read(tmp_path)[old]["records"]) == found["earlier"]
    enter(tmp_path, emitted, [row()])
    assert set(ledger.read(tmp_path)) == {ledger.file_hash(emitted)} != {old}
    assert state(tmp_path)[0] == "verified"


def test_files_that_are_gone_are_forgotten(tmp_path, emitted):
    enter(tmp_path, emitted, [row()])
    other = tmp_path / "other" / "triton.py"
    other.parent.mkdir()
    emitted.rename(other)
    enter(tmp_path, other, [row()], CPU)
    assert [entry["file"] for entry in ledger.read(tmp_path).values()] == ["other/triton.py"]


def test_garbage_is_an_error(tmp_path, emitted):
    for text in ("{", "[]", '{"files": {"x": 1}}'):
        (tmp_path / ledger.FILENAME).write_text(text)
        with pytest.raises(KgenError, match="cannot read the ledger"):
            ledger.read(tmp_path)


def _enter_one(generated: Path, number: int) -> None:
    path = generated / f"spec{number}" / "triton.py"
    enter(generated, path, [row()])


def test_processes_do_not_lose_entries(tmp_path):
    for number in range(8):
        path = tmp_path / f"spec{number}" / "triton.py"
        path.parent.mkdir()
        path.write_text(f"x = {number}\n")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_enter_one, args=(tmp_path, n)) for n in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(ledger.read(tmp_path)) == 8


def test_the_header_of_a_file_does_not_count(tmp_path: Path) -> None:
    """A change of the schema changes the line `inputs` of files whose programs stay the same."""
    path = tmp_path / "triton.py"
    given = {"spec": "x", "spec_file": UserText("x.yaml"), "spdx": UserText("MIT")}
    hashes = []
    for body, inputs in (("a = 1\n", "0" * 16), ("a = 1\n", "1" * 16), ("a = 2\n", "0" * 16)):
        path.write_text(header.stamp(body, "#", inputs=inputs, **given))
        hashes.append(ledger.file_hash(path))
    assert hashes[0] == hashes[1] != hashes[2]


def test_all_that_is_recorded_of_a_file(tmp_path: Path) -> None:
    """The same holds for a variant, whose file is one folder deeper."""
    path = tmp_path / "many/bf16/triton.py"
    path.parent.mkdir(parents=True)
    path.write_text("x = 1\n")
    found = {"killed": 9, "lived": 1}
    ledger.record_mutated(tmp_path, path, ledger.file_hash(path), found, {"triton": "3.6.0"})
    ledger.record_sanitized(
        *(tmp_path, path, ledger.file_hash(path), "memcheck", True),
        device="GPU",
        capability="9.0",
        versions={"torch": "2.11.0"},
    )
    records = ledger.records_of(path, tmp_path)
    assert set(records) == {"mutants", "memcheck GPU"}
    assert records["mutants"]["counts"] == found
    path.write_text("x = 2\n")
    assert ledger.records_of(path, tmp_path) == {}
    with pytest.raises(KgenError, match="no such file"):
        ledger.records_of(tmp_path / "gone.py", tmp_path)
