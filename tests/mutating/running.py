"""One mutant: its file beside the others of its spec, imported, and verified until something is wrong."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from mutating.operators import Mutant

ROOT = Path(__file__).resolve().parents[2]
FIRST = ("off-tile", "several", "q-shorter", "guarded", "decode-some", "tile", "odd")
"""Cases that find most, which run first."""


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: `killed`, by what; `lived`; or `equivalent`: it has the same machine code."""

    file: str
    mutant: Mutant
    what: str
    by: str


def tried(spec: Path, name: str, mutant: Mutant) -> Outcome:
    """What becomes of a mutant of `generated/<spec>/<name>`, in Triton's interpreter or the tests' own."""
    file = f"{spec.stem}/{name}"
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "generated" / spec.stem, Path(folder) / spec.stem)
        path = Path(folder) / file
        path.write_text(mutant.of(path.read_text()))
        try:
            by = _wrong(spec, path)
        except Exception as error:
            # An error is found, whatever it is: a user would meet it.
            frame = traceback.extract_tb(sys.exc_info()[2])[-1]
            by = f"{type(error).__name__} in {frame.name}"
        return Outcome(file, mutant, "killed" if by else "lived", by)


def _wrong(spec: Path, path: Path) -> str:
    """The first case that is wrong."""
    import torch

    from kgen.spec.load import load
    from kgen.verify import integration, interpreter
    from kgen.verify.families import Subject, family_of, problem_of

    torch.set_num_threads(1)
    interpreter.mend()
    problem = problem_of(load(spec))
    hopper = path.name == "hopper.py"
    module = _module(path.with_name("triton.py"), hopper)
    family = family_of(problem)
    subject = Subject(problem, "triton", path, module, "cpu")
    checks = {} if hopper else integration.named(family)
    quick = family.cases(problem, True)
    drawn = (*_for_hopper(problem), *quick) if hopper else quick
    with mock.patch.object(family, "cases", return_value=drawn):
        names = sorted(
            (case.name for case in drawn), key=lambda n: FIRST.index(n) if n in FIRST else len(FIRST)
        )
        for group in family.groups(problem):
            for name in names:
                for check in family.run_case(subject, group, name):
                    if not check.ok:
                        return f"{group} {name}"
    wanted = integration.checks(family, "cpu") if checks else ()
    for name in wanted:
        checks[name](subject)
    return ""


def _module(path: Path, hopper: bool) -> Any:
    from kgen.verify.toolchain import import_file

    if not hopper:
        return import_file(path, "kgen_mutant")
    import gluon_interpreter

    with gluon_interpreter.installed():
        module = import_file(path, "kgen_mutant")
        beside = module._hopper()
    gluon_interpreter.prepare(module)
    gluon_interpreter.prepare(beside)
    return module


def _for_hopper(problem: Any) -> tuple[Any, ...]:
    """More tiles than slots in the rings, and several tiles of queries for each program."""
    from kgen.kernels.attention.verify.inputs import Case, fit

    return (fit(problem, Case("long", 450, 450, heads_kv=2, group=1, lse=True), 0),)


def machine_code(spec: Path, name: str, mutant: Mutant | None) -> str:
    """A hash of what the kernels of a spec's Triton files are compiled to for sm_90."""
    os.environ["TRITON_DISABLE_LINE_INFO"] = (
        "1"  # before Triton is imported: machine code without the places of files
    )
    import kgen.verify.compile_triton as compiling
    from kgen.spec.load import load
    from kgen.verify.compiling import CompileJob
    from kgen.verify.emitted import emitted_files
    from kgen.verify.families import problem_of

    loaded, codes = load(spec), []
    resources = compiling.resources

    def hashed(cubin: bytes) -> Any:
        codes.append(hashlib.sha256(cubin).hexdigest())
        return resources(cubin)

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(compiling, "resources", hashed):
        shutil.copytree(ROOT / "generated" / spec.stem, Path(folder) / spec.stem)
        path = Path(folder) / spec.stem / name
        if mutant is not None:
            path.write_text(mutant.of(path.read_text()))
        (emitted,) = (file for file in emitted_files(Path(folder), loaded) if file.target == "triton")
        compiling.compile_all(
            CompileJob(problem_of(loaded), emitted, "sm_90"), lambda row: codes.append(row["error"] or "")
        )
    return hashlib.sha256("".join(codes).encode()).hexdigest()
