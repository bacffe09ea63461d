"""Try one mutant: write and import its file with the other files of its spec, and verify until a
check fails.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from support.interpreters.tma import by_tma

from mutating.operators import Mutant

ROOT = Path(__file__).resolve().parents[2]
FIRST = (
    *("long", "off-tile", "several", "q-shorter", "guarded", "decode-some", "tile", "odd"),
    *("off-chunk", "kept-states", "kept-steps"),
)
"""Cases that find most mutants. They run first."""

SOON = "launches"
"""A check that is faster than a case. It runs first."""

WAYS = ("pointers", "tma")
"""Ways in which portable kernels load."""
ORDERS = 3
"""Interleavings in which Hopper kernels run per mutant."""
ERROR = "error"
CLAIM_SECONDS = 2.0
"""Time limit per claim of a proof."""


What = Literal["killed", "equivalent", "slower", "gpu", "lived", "lost"]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a mutant, and the check or reason behind it.

    | outcome | meaning |
    |---|---|
    | `killed` | a check failed |
    | `equivalent` | the change has no effect |
    | `slower` | the results are the same, with more loads |
    | `gpu` | no case on the CPU runs the changed code |
    | `lived` | no check failed |
    | `lost` | the worker ended |
    """

    file: str
    mutant: Mutant
    what: What
    by: str = ""
    loads: int = 0
    """Elements that the Triton kernels load in all cases, or blocks that TMA loads."""


@dataclass(frozen=True)
class File:
    """An emitted file, with the name and the text of its spec."""

    spec: str
    text: str
    path: Path

    @property
    def called(self) -> str:
        """Name of the file in the report, for example `causal/triton.py`."""
        return f"{self.spec}/{self.path.name}"

    def loaded(self) -> Any:
        """Return the loaded spec."""
        from kgen.spec.load import loads

        return loads(self.text, f"{self.spec}.yaml")


def tried(file: File, mutant: Mutant) -> Outcome:
    """Verify a mutant in the Triton or Gluon interpreter."""
    by, loads = "", [0]
    for how in _ways(file, mutant):
        # Count only the loads of the file's own kernels.
        counted = loads if file.path.name == "hopper.py" or how in WAYS else []
        with tempfile.TemporaryDirectory() as folder, _counted(counted):
            path = written(Path(folder), file, mutant)
            if how == "tma":
                text = path.read_text()
                path.write_text(by_tma(text))
                if by_tma(text) == text:
                    continue
            try:
                order = how if isinstance(how, int) else None
                by = _wrong(file, path, order, mutant.function)
            except Exception as error:
                # Any error finds the mutant: a user would see it.
                frame = traceback.extract_tb(sys.exc_info()[2])[-1]
                by = f"{type(error).__name__} in {frame.name}"
        if by:
            break
    return Outcome(file.called, mutant, "killed" if by else "lived", by, sum(loads))


def _ways(file: File, mutant: Mutant) -> tuple[str | int, ...]:
    """Return the ways to run a mutant: loads by pointers, loads by TMA, and Hopper kernels in
    several interleavings.
    """
    orders = tuple(range(ORDERS))
    if file.path.name == "hopper.py":
        return orders
    launches_hopper = not mutant.kernel and file.path.with_name("hopper.py").exists()
    return (*WAYS, *orders[: int(launches_hopper)])


@contextlib.contextmanager
def _counted(loads: list[int]) -> Iterator[None]:
    """Append the number of loaded elements or blocks to `loads`."""
    import numpy

    from kgen.verify.gluon import memory
    from kgen.verify.memory import Memory

    by_pointers, fetch = Memory.load, memory.fetch

    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        loads.append(1 + numpy.count_nonzero(mask))  # an empty load takes time, too
        return by_pointers(self, pointers, mask, *rest)

    def fetched(*args: Any) -> None:
        loads.append(1)
        fetch(*args)

    with mock.patch.object(Memory, "load", load), mock.patch.object(memory, "fetch", fetched):
        yield


def written(folder: Path, file: File, mutant: Mutant | None) -> Path:
    """Write the mutated file and the other files of its spec to `folder`. Return its path."""
    shutil.copytree(file.path.parent, folder / file.spec)
    path = folder / file.spec / file.path.name
    if mutant is not None:
        path.write_text(mutant.of(path.read_text()))
    return path


def _wrong(file: File, path: Path, order: int | None, function: str) -> str:
    """Return the first failure.

    `order` is the interleaving of Hopper kernels, or None for portable kernels. `function` is the
    changed function. Checks of serving run first if it serves batches, else last.
    """
    import torch

    from kgen.kernels.attention.schedules.hopper.cases import for_hopper
    from kgen.kernels.attention.verify.serving import PREFIX
    from kgen.verify import integration, interpreter
    from kgen.verify.families import Subject, family_of, problem_of

    torch.set_num_threads(1)
    interpreter.mend()
    problem = problem_of(file.loaded())
    hopper, path = order is not None, path.with_name("triton.py")
    module = module_of(path, order)
    family: Any = family_of(problem)
    subject = Subject(problem, "triton", path, module, "cpu")
    if hopper:
        # Index by name, so that Hopper cases replace other cases.
        drawn = {case.name: case for case in (*family.cases(problem, True), *for_hopper(problem))}
        family.cases = lambda *_, **__: (*drawn.values(),)
    checks = integration.named(family)
    if not hopper and SOON in checks:
        checks[SOON](subject)
    wanted = [
        (group, name)
        for group in family.groups(problem)
        for name in family.case_names(problem, group, True)
    ]
    served = "serve" in function or "append" in function
    batches = [one for one in wanted if one[1].startswith(PREFIX)]
    others = [one for one in wanted if one not in batches]
    others.sort(key=lambda one: _rank(*one, function))
    if served:
        if by := _failed(family, subject, batches):
            return by
        checks["serve"](subject)
    if by := _failed(family, subject, others if served else [*others, *batches]):
        return by
    for name in ("wrong-offsets",) if hopper else integration.checks(family, "cpu"):
        checks[name](subject)
    return ""


def _rank(group: str, name: str, function: str) -> tuple[bool, int]:
    """Return the place of a case in the order. Cases of the pass of a function come first."""
    rank = FIRST.index(name) if name in FIRST else len(FIRST)
    return group[:4] not in function, rank


def _failed(family: Any, subject: Any, cases: Iterable[tuple[str, str]]) -> str:
    """Return the first case that fails, or an empty string."""
    for group, name in cases:
        if not all(check.ok for check in family.run_case(subject, group, name)):
            return f"{group} {name}"
    return ""


def module_of(path: Path, order: int | None = None) -> Any:
    """Import an emitted file.

    `order` is the interleaving of Hopper kernels, or None for portable kernels.
    """
    from kgen.verify.toolchain import import_file

    if order is None:
        return import_file(path, "kgen_mutant")
    from kgen.kernels.attention.schedules.hopper.verify import imported
    from kgen.verify.gluon.running import explore

    explore(1000 * order)
    return imported(path, "kgen_mutant")


def refuted(file: File, mutant: Mutant) -> str:
    """Return the first claim that the proofs of linear attention refute for a changed kernel, or an
    empty string.

    A proof covers every size, so it also finds errors that only large tensors show.
    """
    from kgen.kernels.linear_attention.prove.obligations import of_text
    from kgen.prove.obligations import Verdict, decide

    loaded = file.loaded()
    if loaded.spec.kernel != "linear_attention":
        return ""
    text = mutant.of(file.path.read_text(encoding="utf-8"))
    kernel = mutant.function.removeprefix("_").removesuffix("_kernel")
    for one in of_text(loaded, text, only=kernel):
        if decide(one, CLAIM_SECONDS).verdict is Verdict.REFUTED:
            return f"proof of {one.kernel}: {one.what}"
    return ""


def compiled(file: File, mutant: Mutant | None) -> list[str]:
    """Return a hash of each compiled kernel of a spec's Triton files for every architecture, or an
    error.
    """
    # Set before Triton is imported: use its compiler, and omit file names from machine code.
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    import kgen.verify.compile_triton as compiling
    from kgen.verify.compiling import DEFAULT_ARCHS, CompileJob
    from kgen.verify.emitted import emitted_files
    from kgen.verify.families import problem_of

    loaded, codes = file.loaded(), []
    resources = compiling.resources

    def hashed(cubin: bytes) -> Any:
        codes.append(hashlib.sha256(cubin).hexdigest())
        return resources(cubin)

    def failed(row: Any) -> None:
        if row["error"]:
            codes.append(f"{ERROR} of {row['kernel']}")

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(compiling, "resources", hashed):
        written(Path(folder), file, mutant)
        (emitted,) = (one for one in emitted_files(Path(folder), loaded) if one.target == "triton")
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            for arch in DEFAULT_ARCHS:
                try:
                    compiling.compile_all(CompileJob(problem_of(loaded), emitted, arch), failed)
                except Exception as error:
                    codes.append(f"{ERROR}: {type(error).__name__}")
    return codes
