"""The kernels for Hopper on the CPU, in `gluon_interpreter`, against float64."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Searched ranges, a window, heads in groups with a mask of one end, scores that take a function, a bias of the keys.
SPECS = ["document_causal", "sliding_window", "llama3_gqa", "softcap_causal", "causal_alibi", "full"]


@pytest.mark.parametrize("name", SPECS)
def test_verified(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        launched, wrong = pool.submit(_verify, name).result()
    assert not wrong, "\n".join(wrong)
    assert launched["_forward_hopper_kernel"] >= 3


# What the interpreter is for: each of these would be a race on a GPU.
EARLY = {
    "keys freed before they are read": (
        "    qk = warpgroup_mma_wait(PENDING, deps=[qk_on])\n    _free(kv_ring, 2 * i, SLOTS)\n",
        "    _free(kv_ring, 2 * i, SLOTS)\n    qk = warpgroup_mma_wait(PENDING, deps=[qk_on])\n",
    ),
    "values read before they are there": (
        "    v = _fetched(kv_ring, 2 * i + 1, SLOTS)\n",
        "    v = _slot(kv_ring, 2 * i + 1, SLOTS)\n",
    ),
}


@pytest.mark.parametrize("what", EARLY)
def test_races_are_found(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    right, wrong = EARLY[what]
    text = (ROOT / "generated" / "full" / "triton.py").read_text()
    assert right in text
    path = tmp_path / "full.py"
    path.write_text(text.replace(right, wrong) + SLOT)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        _, found = pool.submit(_verify, "full", path).result()
    assert found


SLOT = """

def _slot(ring, i, SLOTS):
    slots, _, _ = ring
    tile = slots.index(i % SLOTS)
    return tile.reshape([tile.shape[2], tile.shape[3]])
"""


def _verify(name: str, path: Path | None = None) -> tuple[dict[str, int], list[str]]:
    """How often each kernel ran, and what is wrong."""
    import gluon_interpreter
    import torch

    from kgen.spec.load import load
    from kgen.verify import interpreter
    from kgen.verify.attention import cases
    from kgen.verify.attention.inputs import Case
    from kgen.verify.families import Subject, problem_of
    from kgen.verify.toolchain import import_file

    torch.set_num_threads(1)
    interpreter.mend()
    path = path or ROOT / "generated" / name / "triton.py"
    with gluon_interpreter.installed():
        module: Any = import_file(path, "kgen_test_hopper")
    gluon_interpreter.prepare(module)
    launched: dict[str, int] = {}
    for kernel, value in list(vars(module).items()):
        if isinstance(value, gluon_interpreter.Kernel) and kernel.endswith("_hopper_kernel"):
            launched[kernel] = 0
            setattr(module, kernel, _Counted(value, kernel, launched))
    problem = problem_of(load(ROOT / "specs" / f"{name}.yaml"))
    group = 2 if problem.gqa == "any" else int(problem.gqa)
    # More tiles than slots in the rings, and several tiles of queries for each program; one; rows among others.
    drawn = (
        Case("long", 450, 450, heads_kv=2, group=group, lse=True),
        Case("one", 1, 1, group=group),
        Case("guarded", 197, 197, 2, 1, group, layout="guarded", scale=0.2),
    )
    cases.cases = lambda problem, quick: drawn
    subject, wrong = Subject(problem, "triton", path, module, "cpu"), []
    for pass_ in cases.groups(problem):
        for case in drawn:
            checks = cases.run_case(subject, pass_, case.name)
            wrong += [f"{pass_} {case.name}: {c.message}" for c in checks if not c.ok]
    return launched, wrong


class _Counted:
    def __init__(self, kernel: Any, name: str, launched: dict[str, int]) -> None:
        self.kernel, self.name, self.launched = kernel, name, launched

    def __getitem__(self, grid: Any) -> Any:
        self.launched[self.name] += 1
        return self.kernel[grid]
