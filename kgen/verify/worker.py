"""Runs the cases of one emitted file in a process of its own: `python -m kgen.verify.worker JOB`.

JOB is a pickled `Job`. Standard output carries JSON lines, `{"start": [pass, case]}` and then a row, and nothing
else: whatever the kernels or libraries print goes to standard error. On a GPU `{"unused": why}` says that kernels for
one chip do not run there.
"""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import IO, Any, TypeVar

import torch

from kgen.verify import compare, integration, interpreter
from kgen.verify.emitted import Emitted
from kgen.verify.families import ChipCases, Subject, chip_cases, family_of
from kgen.verify.processes import serve
from kgen.verify.toolchain import import_file

T = TypeVar("T")
WAITS = (1.0, 4.0, 16.0)
"""Seconds until a case that ran out of memory is tried again."""
NOT_LAUNCHED = "does not serve the tensors of any small case"
"""Why kernels for one chip did not run, where their launcher took the others."""
NO_MACHINE_CODE = "NoMachineCode"
"""What a package raises, which has that class in a module of its own."""


@dataclass(frozen=True)
class Job:
    """What one worker does: cases of one emitted file, each the name of a pass and its own."""

    problem: Any
    emitted: Emitted
    device: str
    cases: tuple[tuple[str, str], ...]


def case_names(problem: Any, group: str, device: str, quick: bool) -> tuple[str, ...]:
    """All the cases of a pass group, in running order; integration checks go with the first group."""
    family = family_of(problem)
    checks = integration.checks(family, device) if group == family.groups(problem)[0] else ()
    return tuple(family.case_names(problem, group, quick)) + checks


def main(job: Job, lines: IO[str]) -> int:
    """Run a job; 0 when every case could be run, whatever came of it."""

    def say(line: Mapping[str, Any]) -> None:
        print(json.dumps(line), file=lines, flush=True)

    say({"start": job.cases[0]})  # an import that dies counts against the first case
    if job.device == "cpu":
        interpreter.mend()
    problem, file = job.problem, job.emitted
    module = import_file(file.path, f"kgen_emitted_{problem.name}_{file.stem}")
    # Of a package, the module that has the function.
    module = sys.modules[getattr(module, problem.name).__module__]
    subject = Subject(problem, file.target, file.path, module, job.device)
    family = family_of(problem)
    checks = integration.named(family)
    chip = file.chip(problem)
    if chip and job.device == "cuda":
        say({"unused": chip_cases(chip).unused(module)})
    in_interpreter = ChipRunner(chip_cases(chip), subject) if chip and job.device == "cpu" else None
    for group, name in job.cases:
        say({"start": (group, name)})
        began = time.perf_counter()
        found: list[compare.Check] = []
        message, unbuilt, unrun = "", False, None
        try:
            if name in checks:
                _with_memory(lambda: checks[name](subject))  # noqa: B023
            elif in_interpreter and name in in_interpreter.names:
                found, unrun = in_interpreter.run(group, name)
            else:
                found = _with_memory(lambda: family.run_case(subject, group, name))  # noqa: B023
        except Exception as error:
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"
            unbuilt = any(type(cause).__name__ == NO_MACHINE_CODE for cause in _causes(error))
        message = message or "; ".join(check.message for check in found if not check.ok)
        worst = max(found, key=lambda check: (not check.ok, check.ratio), default=None)
        say(
            {
                "pass": group,
                "case": name,
                "ok": not message,
                "error": _number(worst.error) if worst else None,
                "eager": _number(worst.eager) if worst else None,
                "ratio": _number(worst.ratio) if worst else None,
                "seconds": round(time.perf_counter() - began, 3),
                "message": message[:2000],
                "outputs": {c.name: [_number(c.error), _number(c.ratio)] for c in found},
                **({"unbuilt": True} if unbuilt else {}),
                **({"unrun": unrun} if unrun else {}),
            }
        )
        if message and job.device == "cuda":
            # A broken CUDA context would fail every case that follows: leave, and let the parent start
            # afresh.
            torch.cuda.synchronize()
    return 0


class ChipRunner:
    """Runs cases of kernels for one chip in their interpreter, for which the file is imported a second time."""

    def __init__(self, chip: ChipCases, subject: Subject) -> None:
        self.chip, self.subject = chip, subject
        self.names = chip.case_names(subject.problem)
        self.module: ModuleType | None = None

    def run(self, group: str, name: str) -> tuple[list[compare.Check], str | None]:
        """The verdicts of a case, or why none of the kernels ran."""
        if why := self.chip.unable(self.subject.module):
            return [], why
        if self.module is None:
            name_of_module = f"kgen_emitted_{self.subject.problem.name}_chip"
            self.module = self.chip.imported(self.subject.path, name_of_module)
        found = self.chip.run_case(replace(self.subject, module=self.module), group, name)
        return ([], NOT_LAUNCHED) if found is None else (found, None)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _with_memory(run: Callable[[], T]) -> T:
    """What `run` gives, tried again a few times where a device has no memory left: other workers give some back."""
    for seconds in WAITS:
        try:
            return run()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            time.sleep(seconds)
    return run()


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


if __name__ == "__main__":
    serve(main)
