"""Tasks of some mutants of a file each, and the worker that tries them:
`python -m mutating.mutants JOB`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import kgen
from kgen.verify.farm.tasks import Messages, Task
from kgen.verify.interpreter import ENVIRONMENT
from kgen.verify.processes import WorkerError, importing_from, messages, serve
from mutating.operators import Mutant
from mutating.reasons import reason, unseen
from mutating.running import ERROR, File, Outcome, compiled, refuted, tried

SECONDS = 600
"""Time limit of any step, in seconds. Correct files take less on every machine."""
NOTHING = Mutant("", "", 0, 0, 0, "", "", kernel=False)
OF_A_TASK = 16
"""Mutants per task. Each task runs the unchanged file once."""
CODE = ("tests",)
"""Folders that workers import from, in addition to the package."""


@dataclass(frozen=True)
class Mutants:
    """Job of one worker."""

    file: File
    mutants: tuple[Mutant, ...]


def tasks(file: File, drawn: Sequence[Mutant]) -> list[Task]:
    """Return the tasks for the mutants of a file."""
    parts = [tuple(drawn[first : first + OF_A_TASK]) for first in range(0, len(drawn), OF_A_TASK)]
    return [
        Task((file.called, str(number)), outcomes, Mutants(file, part), (file.path.parent,))
        for number, part in enumerate(parts)
    ]


def outcomes(job: Mutants, instead: Messages | None = None) -> Iterator[dict[str, Any]]:
    """Yield one row per mutant. If the worker ends early, the rest of its mutants are `lost`."""
    paths = (Path(kgen.__file__).parents[1], Path(__file__).parents[1])
    environment = {
        **ENVIRONMENT,
        "PYTHONPATH": importing_from(*paths, os.environ.get("PYTHONPATH")),
    }
    said, trouble = 0, "ended before its last mutant"
    try:
        for message in (instead or messages)("mutating.mutants", job, 6.0 * SECONDS, environment):
            said += 1
            yield message
    except WorkerError as error:
        trouble = str(error)
    for mutant in job.mutants[said:]:
        yield asdict(Outcome(job.file.called, mutant, "lost", trouble[:2000]))


def main(job: Mutants, lines: IO[str]) -> None:
    """Try the mutants of a job."""
    as_it_is = AsItIs(job.file)
    for mutant in job.mutants:
        print(json.dumps(asdict(as_it_is.became(mutant))), file=lines, flush=True)


def outcome(row: dict[str, Any]) -> Outcome:
    """Return the outcome in a row."""
    return Outcome(**{**row, "mutant": Mutant(**row["mutant"])})


class AsItIs:
    """The unchanged file of a spec, and its results."""

    def __init__(self, file: File) -> None:
        self.file = file
        self._limit = 0.0
        self._loads = 0
        self._codes: list[str] = []

    def became(self, mutant: Mutant) -> Outcome:
        """Return the outcome of a mutant."""
        if not self._limit:
            self._measure()
        outcome = self._tried(mutant)
        if outcome.what != "lived":
            return outcome
        if outcome.loads > self._loads:
            return replace(outcome, what="slower")
        if mutant.kernel and (by := self._apart("forkserver", refuted, mutant)):
            return replace(outcome, what="killed", by=by)
        what, why = reason(outcome.file, mutant)
        if what != "equivalent" and mutant.kernel:
            # Compare machine code before a GPU run. If it is identical, the mutant is equivalent.
            outcome = self._told_by_compiler(outcome)
            if outcome.what != "lived":
                return outcome
        if what:
            return replace(outcome, what=what, by=why)
        if self._tried(replace(mutant, new="(1 // 0)")).what == "lived":
            # The place never ran if a change that always raises passes too.
            return replace(outcome, what="gpu", by="no case on the CPU comes there")
        return replace(outcome, by=unseen(outcome.file, mutant))

    def _measure(self) -> None:
        """Run the unchanged file, count its loads and set the time limit, by which mutants that
        hang are found.
        """
        began = time.monotonic()
        as_it_is = self._apart("forkserver", tried, NOTHING)
        assert as_it_is.what == "lived", f"{as_it_is.file} is wrong as it is: {as_it_is.by}"
        self._limit, self._loads = 30 + 3 * (time.monotonic() - began), as_it_is.loads

    def _tried(self, mutant: Mutant) -> Outcome:
        try:
            outcome: Outcome = self._apart("forkserver", tried, mutant, self._limit)
        except multiprocessing.TimeoutError:
            return Outcome(self.file.called, mutant, "killed", "no end")
        return outcome

    def _told_by_compiler(self, outcome: Outcome) -> Outcome:
        """Return `equivalent` if the machine code is identical, `killed` if the mutant does not
        compile.
        """
        self._codes = self._codes or self._apart("spawn", compiled, None)
        codes = self._apart("spawn", compiled, outcome.mutant)
        if codes == self._codes:
            return replace(outcome, what="equivalent", by="machine code")
        failed = [code for code in codes if code.startswith(ERROR) and code not in self._codes]
        return replace(outcome, what="killed", by=f"compiling: {failed[0]}") if failed else outcome

    def _apart(
        self, how: str, function: Callable[..., Any], mutant: Mutant | None, limit: float = SECONDS
    ) -> Any:
        """Call a function in a separate process, which may hang or die."""
        context: Any = multiprocessing.get_context(how)
        if how == "forkserver":
            context.set_forkserver_preload(
                ["mutating.running", "torch", "triton", "kgen.verify.integration"]
            )
        with context.Pool(1) as pool:
            return pool.apply_async(function, (self.file, mutant)).get(limit)


if __name__ == "__main__":
    serve(main)
