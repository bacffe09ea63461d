"""The Hopper kernels in `kgen verify`: small cases in the Gluon interpreter on the CPU, or the
reason for none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kgen.kernels.linear_attention.schedules.hopper import CHIP
from kgen.kernels.linear_attention.verify.cases import run_drawn
from kgen.kernels.linear_attention.verify.inputs import Case, fitted
from kgen.kernels.linear_attention.verify.problem import Problem
from kgen.verify.compare import Check
from kgen.verify.families import Subject
from kgen.verify.gluon import interpreter
from kgen.verify.gluon.interpreter import Kernel, installed

PREFIX = "hopper-"
GLUON_FOR_HOPPER = "triton.experimental.gluon.language.nvidia.hopper"
PARTS = "parts"
"""The case whose sequence is divided into parts."""
FORWARD, BACKWARD = "_sweep_kernel", "_sweep_back_kernel"
"""The Gluon kernels of both passes."""


def for_hopper(problem: Problem) -> tuple[Case, ...]:
    """Return the cases of a spec: less than a chunk, more chunks than slots, and hard values."""
    C = problem.chunk_size
    wanted = (
        Case("one", (1,), states="none"),
        Case("more", (4 * C + 3,), states="both"),
        Case("heads", (C + 5,), batch=2, heads=2, layout="padded", do="strided", states="out"),
        Case("states", (2 * C + 9,), heads=2, within=problem.state_dtype),
        Case("hard", (C + 9,), gates="hard", keys="few", states="in"),
        Case("steep", (2 * C + 1,), gates="steep", scale=-0.37),
        Case("repeated", (C + 7,), gates="none", keys="repeated"),
        Case(PARTS, (6 * C + 5,), states="both", within=problem.state_dtype),
    )
    return fitted(problem, iter(wanted))


def case_names(problem: Problem) -> tuple[str, ...]:
    """Return the case names, which are the same for each pass."""
    return tuple(PREFIX + case.name for case in for_hopper(problem))


def imported(path: Path, name: str) -> ModuleType:
    """Import an emitted file whose Hopper kernels run in the Gluon interpreter."""
    with mock.patch.object(interpreter, "installed", _installed):
        module: ModuleType = interpreter.imported(path, name, CHIP)
    return module


@contextmanager
def _installed() -> Iterator[None]:
    """Install the interpreter with `mma_v2`, which no other kernel uses."""
    with installed():
        vars(sys.modules[GLUON_FOR_HOPPER])["mma_v2"] = _mma_in_registers
        yield


def _mma_in_registers(a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
    """Return acc + a @ b. One warp multiplies, and waits for the result."""
    assert a.dtype == b.dtype
    return acc + a.float() @ b.float()


def run_case(subject: Subject, group: str, name: str) -> list[Check] | None:
    """Return the checks of each output of a call. None if the portable kernels served the call.

    No kernel of the pass `decode` is for Hopper.
    """
    if group == "decode":
        return None
    (case,) = (case for case in for_hopper(subject.problem) if PREFIX + case.name == name)
    module = _of_kernels(subject.module)
    chunks = 1 if case.name == PARTS else module.PART
    with _launched() as kernels, mock.patch.object(module, "PART", chunks):
        found = run_drawn(subject, group, case)
    own = BACKWARD if group == "backward" and hasattr(module, BACKWARD) else FORWARD
    served = own in kernels
    return found if served or not all(check.ok for check in found) else None


def _of_kernels(module: ModuleType) -> Any:
    """Return the module of the Hopper kernels: the file itself if it has all kernels."""
    own = vars(module)
    return own[CHIP.module]() if CHIP.module in own else module


@contextmanager
def _launched() -> Iterator[list[str]]:
    """Yield a list that collects the names of the kernels that the interpreter launches."""
    names: list[str] = []
    launch = Kernel.__getitem__

    def counted(self: Kernel, grid: tuple[int]) -> Any:
        names.append(self.function.__name__)
        return launch(self, grid)

    with mock.patch.object(Kernel, "__getitem__", counted):
        yield names


def unable(names: Mapping[str, Any]) -> str | None:
    """Return the reason why the kernels cannot be imported, or None. Some Triton versions lack
    functions.
    """
    known = ", ".join(f"{major}.{minor}" for major, minor in names["GLUON_TRITONS"])
    return None if names["TRITON"] in names["GLUON_TRITONS"] else f"takes Triton {known}"


def unused(module: ModuleType) -> str | None:
    """Return the reason why the emitted file uses the portable kernels on a device, or None."""
    because = vars(module)["_portable_because"](torch.device("cuda", torch.cuda.current_device()))
    return f"does not serve: {because}" if because else None
