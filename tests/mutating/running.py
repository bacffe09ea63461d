"""One mutant: its file beside the others of its spec, imported, and verified until something is wrong."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from support.interpreters.tma import by_tma

from mutating.operators import Mutant

ROOT = Path(__file__).resolve().parents[2]
FIRST = ("long", "off-tile", "several", "q-shorter", "guarded", "decode-some", "tile", "odd")
"""Cases that find most, which run first."""

SOON = "launches"
"""A check that takes less than a case."""

WAYS = ("pointers", "tma")
"""How kernels for any chip load."""
ORDERS = 3
"""Of what may happen in kernels for Hopper, that a mutant is tried in."""
ERROR = "error"


What = Literal["killed", "equivalent", "slower", "gpu", "lived", "lost"]


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant, and by what.

    `killed`; `equivalent`: it changes nothing; `slower`: it gives the same of more loads; `gpu`: no case on the CPU
    comes to what it changes; `lived`; or `lost`: its worker was.
    """

    file: str
    mutant: Mutant
    what: What
    by: str = ""
    loads: int = 0
    """Elements that Triton's kernels load in all cases, or blocks that TMA does."""


@dataclass(frozen=True)
class File:
    """An emitted file, the name of its spec, and the text of that."""

    spec: str
    text: str
    path: Path

    @property
    def called(self) -> str:
        """`causal/triton.py`."""
        return f"{self.spec}/{self.path.name}"

    def loaded(self) -> Any:
        """The spec."""
        from kgen.spec.load import loads

        return loads(self.text, f"{self.spec}.yaml")


def tried(file: File, mutant: Mutant) -> Outcome:
    """What becomes of a mutant, in Triton's interpreter or that of Gluon."""
    by, loads = "", [0]
    for how in _ways(file, mutant):
        # Of the file's own kernels.
        counted = loads if file.path.name == "hopper.py" or how in WAYS else []
        with tempfile.TemporaryDirectory() as folder, _counted(counted):
            path = written(Path(folder), file, mutant)
            if how == "tma":
                text = path.read_text()
                path.write_text(by_tma(text))
                if by_tma(text) == text:
                    continue
            try:
                by = _wrong(file, path, how if isinstance(how, int) else None)
            except Exception as error:
                # An error is found, whatever it is: a user would meet it.
                frame = traceback.extract_tb(sys.exc_info()[2])[-1]
                by = f"{type(error).__name__} in {frame.name}"
        if by:
            break
    return Outcome(file.called, mutant, "killed" if by else "lived", by, sum(loads))


def _ways(file: File, mutant: Mutant) -> tuple[str | int, ...]:
    """How a mutant is run: by pointers, by TMA, and by the kernels for Hopper in several orders."""
    orders = tuple(range(ORDERS))
    if file.path.name == "hopper.py":
        return orders
    launches_hopper = not mutant.kernel and file.path.with_name("hopper.py").exists()
    return (*WAYS, *orders[: int(launches_hopper)])


@contextlib.contextmanager
def _counted(loads: list[int]) -> Iterator[None]:
    """Adds what is loaded meanwhile."""
    import numpy

    from kgen.verify.gluon import memory
    from kgen.verify.memory import Memory

    by_pointers, fetch = Memory.load, memory.fetch

    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        loads.append(1 + numpy.count_nonzero(mask))  # a load of nothing takes time, too
        return by_pointers(self, pointers, mask, *rest)

    def fetched(*args: Any) -> None:
        loads.append(1)
        fetch(*args)

    with mock.patch.object(Memory, "load", load), mock.patch.object(memory, "fetch", fetched):
        yield


def written(folder: Path, file: File, mutant: Mutant | None) -> Path:
    """The file, changed, with what is beside it."""
    shutil.copytree(file.path.parent, folder / file.spec)
    path = folder / file.spec / file.path.name
    if mutant is not None:
        path.write_text(mutant.of(path.read_text()))
    return path


def _wrong(file: File, path: Path, order: int | None) -> str:
    """The first case that is wrong: on Hopper in this order, elsewhere in none."""
    import torch

    from kgen.kernels.attention.schedules.hopper.cases import for_hopper
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
        # By name: those of Hopper take the place of others.
        drawn = {case.name: case for case in (*family.cases(problem, True), *for_hopper(problem))}
        family.cases = lambda *_, **__: (*drawn.values(),)
    checks = integration.named(family)
    if not hopper and SOON in checks:
        checks[SOON](subject)
    wanted = [
        (group, name) for group in family.groups(problem) for name in family.case_names(problem, group, True)
    ]
    for group, name in sorted(wanted, key=lambda one: FIRST.index(one[1]) if one[1] in FIRST else len(FIRST)):
        for check in family.run_case(subject, group, name):
            if not check.ok:
                return f"{group} {name}"
    for name in ("wrong-offsets",) if hopper else integration.checks(family, "cpu"):
        checks[name](subject)
    return ""


def module_of(path: Path, order: int | None = None) -> Any:
    """An emitted file, in one order of what may happen if there is one to tell."""
    from kgen.verify.toolchain import import_file

    if order is None:
        return import_file(path, "kgen_mutant")
    from kgen.verify.gluon.interpreter import imported
    from kgen.verify.gluon.running import explore

    explore(1000 * order)
    return imported(path, "kgen_mutant")


def compiled(file: File, mutant: Mutant | None) -> list[str]:
    """A hash of each kernel that a spec's Triton files are compiled to, for every architecture, or an error."""
    # Before Triton is imported: its compiler, and machine code without the places of files.
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
