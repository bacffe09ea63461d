"""Cases of a spec in a test, run in Triton's interpreter or in the one for Hopper's kernels."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kgen.kernels.attention.verify.inputs import Case
from kgen.spec.load import loads
from kgen.verify.families import problem_of
from kgen.verify.toolchain import import_file
from support.interpreters.single_file import single


def emitted(text: str, folder: Path) -> Path:
    """Return the self-contained file of a spec."""
    loaded = loads(text, "spec.yaml")
    path = folder / f"{loaded.spec.name}.py"
    path.write_text(single(loaded))
    return path


def failures(text: str, path: Path, cases: Sequence[Case | str], hopper: bool = False) -> list[str]:
    """Return the wrong outputs and gradients.

    A case is drawn, or the name of a case of `kgen verify`.
    """
    from kgen.kernels.attention.schedules.hopper.verify import imported
    from kgen.kernels.attention.verify import cases as verification
    from kgen.verify import interpreter
    from kgen.verify.families import Subject

    torch.set_num_threads(1)
    interpreter.mend()
    module = (imported if hopper else import_file)(path, "kgen_test_cases")
    problem = problem_of(loads(text, "spec.yaml"))
    own = [case for case in cases if isinstance(case, Case)]
    known = verification.cases
    verification.cases = lambda problem, quick: (*own, *known(problem, quick))
    subject = Subject(problem, "triton", path, module, "cpu")
    names = [case.name if isinstance(case, Case) else case for case in cases]
    found = []
    for group, name in itertools.product(verification.groups(problem), names):
        checks: list[Any] = verification.run_case(subject, group, name)
        assert checks
        found += [f"{group} {name}: {check.message}" for check in checks if not check.ok]
    return found
