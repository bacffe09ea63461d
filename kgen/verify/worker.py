"""Run the cases of one emitted file in its own process: `python -m kgen.verify.worker JOB`.

JOB is a pickled `Job`. Standard output carries only JSON lines: `{"start": [pass, case]}`, then a
row. Output of kernels and libraries goes to standard error. On a GPU, a line names each `file` of
kernels for one chip. `unused` is the reason why these kernels do not run, or null.
"""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import IO, Any, TypeVar

import torch

from kgen.family import Chip
from kgen.verify import compare, integration, interpreter
from kgen.verify.emitted import Emitted
from kgen.verify.families import Subject, chip_cases, family_of
from kgen.verify.processes import serve
from kgen.verify.toolchain import import_file

T = TypeVar("T")
WAITS = (1.0, 4.0, 16.0)
"""Seconds to wait before a case that ran out of memory is retried."""
NOT_LAUNCHED = "does not serve the tensors of any small case"
"""The reason if the launcher chose other kernels than those for one chip."""
NO_MACHINE_CODE = "NoMachineCode"
"""Name of an exception of packages. Each package has its own class."""


@dataclass(frozen=True)
class Job:
    """The work of one worker: cases of one emitted file, each a pair of pass and name."""

    problem: Any
    emitted: Emitted
    device: str
    cases: tuple[tuple[str, str], ...]


def case_names(problem: Any, group: str, device: str, quick: bool) -> tuple[str, ...]:
    """Return all cases of a group in running order.

    Integration checks belong to the first group.
    """
    family = family_of(problem)
    checks = integration.checks(family, device) if group == family.groups(problem)[0] else ()
    return tuple(family.case_names(problem, group, quick)) + checks


def main(job: Job, lines: IO[str]) -> int:
    """Run a job. Return 0 if every case ran, right or wrong."""

    def say(line: Mapping[str, Any]) -> None:
        print(json.dumps(line), file=lines, flush=True)

    say({"start": job.cases[0]})  # a crash of the import fails the first case
    if job.device == "cpu":
        interpreter.mend()
    problem, file = job.problem, job.emitted
    module = import_file(file.path, f"kgen_emitted_{problem.name}_{file.stem}")
    # For a package, the module that defines the function.
    module = sys.modules[getattr(module, problem.name).__module__]
    subject = Subject(problem, file.target, file.path, module, job.device)
    family = family_of(problem)
    checks = integration.named(family)
    chips = file.chips(problem)
    for chip in chips if job.device == "cuda" else ():
        say({"unused": chip_cases(chip).unused(module), "file": chip.file})
    in_interpreter = _runners(chips, subject) if job.device == "cpu" else {}
    for group, name in job.cases:
        say({"start": (group, name)})
        began = time.perf_counter()
        found: list[compare.Check] = []
        message, unbuilt, unrun = "", False, None
        try:
            if name in checks:
                _with_memory(lambda: checks[name](subject))  # noqa: B023
            elif name in in_interpreter:
                found, unrun = in_interpreter[name].run(group, name)
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
            # A broken CUDA context would fail all following cases. Exit, so that the parent starts
            # another worker.
            torch.cuda.synchronize()
    return 0


class ChipRunner:
    """Runner of cases for the kernels of one chip in their interpreter.

    It imports the file a second time.
    """

    def __init__(self, chip: Chip, subject: Subject) -> None:
        self.chip, self.cases, self.subject = chip, chip_cases(chip), subject
        self.names = self.cases.case_names(subject.problem)
        self.module: ModuleType | None = None

    def run(self, group: str, name: str) -> tuple[list[compare.Check], str | None]:
        """Return the verdicts of a case, or the reason why none of the kernels ran."""
        if why := self.cases.unable(vars(self.subject.module)):
            return [], why
        if self.module is None:
            stem = Path(self.chip.file).stem
            name_of_module = f"kgen_emitted_{self.subject.problem.name}_{stem}"
            self.module = self.cases.imported(self.subject.path, name_of_module)
        found = self.cases.run_case(replace(self.subject, module=self.module), group, name)
        return ([], NOT_LAUNCHED) if found is None else (found, None)


def _runners(chips: Iterable[Chip], subject: Subject) -> dict[str, ChipRunner]:
    """Return the runner of each case for the kernels of a chip."""
    runners = [ChipRunner(chip, subject) for chip in chips]
    return {name: runner for runner in runners for name in runner.names}


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _with_memory(run: Callable[[], T]) -> T:
    """Return the result of `run`.

    Retry if the device has no memory left, because other workers free some.
    """
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
