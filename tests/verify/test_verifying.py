from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.interpreters.own_process import verified
from support.specs.hand_built import causal_alibi, loaded, plain, render

from kgen.diagnostics import KgenError, MissingError
from kgen.verify import ledger, toolchain, verifying
from kgen.verify.events import Event, Judged, Progressed
from kgen.verify.families import problem_of
from kgen.verify.farm.tasks import Here
from kgen.verify.options import VerifyOptions
from kgen.verify.verifying import verify_specs

ROOT = Path(__file__).resolve().parents[2]
HARNESS = sorted((ROOT / "kgen/verify").rglob("*.py"))
"""All modules of `kgen verify`. Verdicts leave out some, which the `thorough` tests add."""
ON_CPU, RECORDED = VerifyOptions("cpu"), VerifyOptions("cpu", record=True)


def edit(path, *pairs):
    text = path.read_text()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)


def wrong(rows):
    return {(row["pass"], row["case"]): row["message"] for row in rows if not row["ok"]}


@pytest.mark.thorough
def test_the_triton_fixture_passes(tmp_path, verdict):
    render(causal_alibi(), tmp_path)
    seen: list[Event] = []
    verdict(problem_of(causal_alibi()), tmp_path, *HARNESS)
    rows = verify_specs([causal_alibi()], tmp_path, ON_CPU, Here(2), seen.append)
    assert wrong(rows) == {}
    assert {row["pass"] for row in rows} == {"forward", "backward"}
    assert {"opcheck", "imports-twice", "misuse", "off-tile"} <= {row["case"] for row in rows}
    steps = [event for event in seen if isinstance(event, Progressed)]
    done = [step.done for step in steps]
    assert len(done) == len(rows)
    assert done == sorted(done)
    assert steps[-1].total == pytest.approx(done[-1])
    assert not (tmp_path / ledger.FILENAME).exists()


def test_the_plain_fixture_passes_and_is_recorded(tmp_path, verdict):
    render(plain(), tmp_path)
    verdict(problem_of(plain()), tmp_path)
    rows = verify_specs([plain()], tmp_path, RECORDED, Here(2))
    assert wrong(rows) == {}
    assert {"ints-zero", "nan-hidden"} <= {row["case"] for row in rows}
    (found,) = ledger.status([plain()], tmp_path)
    assert (found["state"], found["device"]) == ("interpreted", "interpreter")
    (entry,) = ledger.read(tmp_path).values()
    (record,) = entry["records"].values()
    assert set(record["worst"]) == {"out", "lse", "dq", "dk", "dv"}


def test_a_case_without_memory_is_tried_again(tmp_path, verdict):
    """A case that runs out of memory is repeated, because other workers may release some."""
    call = "    out, lse = _forward("
    once = (
        "    if not CALLS:\n        CALLS.append(1)\n"
        "        raise torch.OutOfMemoryError('no memory left')\n"
    )
    path = render(plain(), tmp_path)
    edit(path, (call, once + call), ("import torch\n", "import torch\n\nCALLS = []\n"))
    verdict(problem_of(plain()), tmp_path)
    rows = verified([plain()], tmp_path, "cpu", cases=["tile"])
    assert rows
    assert wrong(rows) == {}


DEAD = "torch.where(hidden, 0.0, torch.softmax(s, -1))"
WRITTEN = "    lse.copy_(weights_lse)\n"
PAST = "    torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).fill_(0.0)\n"
BETWEEN = "    torch.as_strided(q, (1,), (1,), max(0, q.storage_offset() - 1)).fill_(0.0)\n"
DEFINE = "torch.library.define('kgen_test_same::op', '() -> ()')\n"

BUGS = {
    "scale ignored in the gradient of q": ("full_k * scale, dk", "full_k, dk", "backward", "tile"),
    "no gradient through lse": ("+ dlse[..., None]", "", "backward", "off-tile"),
    "off by one in the mask": (">= lens", "> lens", "forward", "tile"),
    "hidden values leak": (
        "v.masked_fill(hidden.mT, 0.0).repeat",
        "v.repeat",
        "forward",
        "nan-hidden",
    ),
    "dead rows are NaN": (DEAD, "torch.exp(s - lse[..., None])", "forward", "ints-zero"),
    "last row not written": ("lse.copy_(weights_lse)", "lse[..., 1:] = 0", "forward", "off-tile"),
    "written past the end": (WRITTEN, WRITTEN + PAST, "forward", "tile"),
    "writes next to its input": (WRITTEN, WRITTEN + BETWEEN, "forward", "guarded"),
    "foreign import": (
        "import torch\n",
        "import torch\nimport numpy\n",
        "forward",
        "imports-alone",
    ),
    "second import fails": (
        "import torch\n",
        "import torch\n" + DEFINE,
        "forward",
        "imports-twice",
    ),
    "fake of another shape": (
        "q.new_empty(q.shape[:3])",
        "q.new_empty(q.shape[1:3])",
        "forward",
        "opcheck",
    ),
    "unchecked dtype": ("t.dtype != torch.float32 for", "False for", "forward", "misuse"),
}


@pytest.mark.parametrize("bug", list(BUGS))
def test_planted_bugs_are_caught(tmp_path, bug, monkeypatch, verdict):
    old, new, group, case = BUGS[bug]
    edit(render(plain(), tmp_path), (old, new))
    # Run only the case that must fail. Its process need not import torch, which takes most of the
    # time.
    whole = verifying._job
    monkeypatch.setattr(verifying, "_groups", lambda problem: (group,))
    one = ((group, case),)
    monkeypatch.setattr(
        verifying, "_job", lambda *args, **how: replace(whole(*args, **how), cases=one)
    )
    verdict(problem_of(plain()), tmp_path)
    assert set(wrong(verified([plain()], tmp_path, "cpu"))) == {(group, case)}


@pytest.mark.thorough
def test_a_wrong_kernel_is_caught(tmp_path, verdict):
    path = render(causal_alibi(), tmp_path)
    edit(path, ("(cols[None, :] - rows[:, None])",
                "(cols[None, :] - rows[:, None] + (rows[:, None] == 64))"),
         ("acc = acc * shrink[:, None]", "acc = acc"))  # fmt: skip
    heard: list[Event] = []
    verdict(problem_of(causal_alibi()), tmp_path, *HARNESS)
    rows = verified([causal_alibi()], tmp_path, "cpu", heard.append)
    messages = wrong(rows)
    assert [event.row for event in heard if isinstance(event, Judged)] == rows
    assert "out: " in messages["forward", "off-tile"]
    assert ("forward", "one") not in messages


# Both passes in one process, then each in its own.
@pytest.mark.thorough
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_crash_costs_one_case(jobs, tmp_path, verdict):
    edit(
        render(plain(), tmp_path),
        (
            "    p, weights_lse,",
            "    import os\n    q.shape[2] != 33 or os.abort()\n    p, weights_lse,",
        ),
    )
    verdict(problem_of(plain()), tmp_path, *HARNESS)
    rows = verify_specs([plain()], tmp_path, RECORDED, Here(jobs))
    messages = wrong(rows)
    assert set(messages) == {("forward", "q-shorter"), ("backward", "q-shorter")}
    assert "SIGABRT" in messages["forward", "q-shorter"]
    assert len({(row["pass"], row["case"]) for row in rows}) == len(rows) > 30
    assert ledger.read(tmp_path) == {}


@pytest.mark.thorough
def test_a_hang_is_ended(tmp_path, monkeypatch, verdict):
    edit(
        render(plain(), tmp_path),
        ("    p, weights_lse,", "    import time\n    time.sleep(600)\n    p, weights_lse,"),
    )
    monkeypatch.setattr(verifying, "RESTARTS", 1)
    began = time.monotonic()
    verdict(problem_of(plain()), tmp_path, *HARNESS)
    rows = verify_specs([plain()], tmp_path, VerifyOptions("cpu", timeout=8), Here(2))
    assert time.monotonic() - began < 200
    assert not any(row["ok"] for row in rows)
    assert "no result within 8 s" in rows[0]["message"]
    assert "not run" in rows[-1]["message"]


@pytest.mark.thorough
def test_a_file_that_does_not_import(tmp_path, monkeypatch, verdict):
    path = render(plain(), tmp_path)
    path.write_text("raise RuntimeError('no luck')\n")
    monkeypatch.setattr(verifying, "RESTARTS", 1)
    verdict(problem_of(plain()), tmp_path, *HARNESS)
    rows = verify_specs([plain()], tmp_path, ON_CPU, Here(2))
    assert "no luck" in rows[0]["message"]


@pytest.mark.thorough
def test_output_of_the_kernel_does_not_disturb(tmp_path, monkeypatch, verdict):
    edit(render(plain(), tmp_path), ("    p, weights_lse,", "    print('{}')\n    p, weights_lse,"))
    monkeypatch.setattr(verifying, "_groups", lambda problem: ("forward",))
    verdict(problem_of(plain()), tmp_path, *HARNESS)
    assert wrong(verify_specs([plain()], tmp_path, ON_CPU)) == {}


def test_chosen_cases(tmp_path, verdict):
    render(plain(), tmp_path)
    verdict(problem_of(plain()), tmp_path)
    rows = verified([plain()], tmp_path, "cpu", cases=["one", "opcheck"])
    assert [(r["pass"], r["case"]) for r in rows] == [
        ("forward", "one"),
        ("forward", "opcheck"),
        ("backward", "one"),
    ]
    with pytest.raises(KgenError, match="there is no case `off-tiles`") as caught:
        verify_specs([plain()], tmp_path, VerifyOptions("cpu", cases=["off-tiles"]))
    assert "off-tile" in (caught.value.diagnostics[0].hint or "")
    with pytest.raises(KgenError, match="only a run of every case is recorded"):
        verify_specs([plain()], tmp_path, VerifyOptions("cpu", record=True, cases=["one"]))


def test_a_ledger_that_cannot_be_read_ends_a_recorded_run_before_it_begins(tmp_path, monkeypatch):
    render(plain(), tmp_path)
    (tmp_path / ledger.FILENAME).write_text("{bad")
    monkeypatch.setattr(verifying, "_run", lambda *arguments: pytest.fail("cases ran"))
    with pytest.raises(KgenError, match="cannot read the ledger"):
        verify_specs([plain()], tmp_path, RECORDED)


def test_not_rendered(tmp_path):
    with pytest.raises(KgenError, match="not rendered") as caught:
        verify_specs([plain()], tmp_path, ON_CPU)
    assert caught.value.diagnostics[0].hint == "kgen render specs/plain.yaml"


def test_no_spec_is_nothing_to_verify(tmp_path):
    assert verify_specs([], tmp_path, ON_CPU) == []


def test_other_kernels_are_refused(tmp_path):
    with pytest.raises(KgenError, match="no reference for kernel `conv`"):
        verify_specs([loaded("n", kernel="conv")], tmp_path, ON_CPU)


def test_missing_packages_and_devices(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert toolchain.pick_device("auto") == "cpu"
    with pytest.raises(MissingError, match="no CUDA device"):
        toolchain.pick_device("cuda")
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingError, match="`torch` is not installed"):
        toolchain.pick_device("auto")
