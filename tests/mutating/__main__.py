"""`scripts/mutate`: mutants of emitted files, and whether verification finds them."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from kgen.verify import ledger
from kgen.verify.interpreter import ENVIRONMENT
from kgen.verify.toolchain import versions
from mutating.operators import OPERATORS, Mutant, mutants
from mutating.reasons import reason
from mutating.running import ERROR, ROOT, Outcome, compiled, tried

REPORT = Path(__file__).parent / "report.json"
SECONDS = 600
"""That anything may take: longer than what is right takes anywhere."""
UNEXPLAINED = {"slower": "gives the same of more loads", "lived": "a hole"}
NOTHING = Mutant("", "", 0, 0, 0, "", "", kernel=False)


def mutate(
    specs: Annotated[list[Path], typer.Argument(help="Spec files whose emitted files are changed.")],
    count: Annotated[
        int, typer.Option(min=1, help="How many of each file, drawn evenly from the operators.")
    ] = 40,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = os.cpu_count() or 1,
    record: Annotated[bool, typer.Option(help="Enter the result in tests/mutating/report.json.")] = True,
) -> None:
    """Change emitted files, one thing at a time, and verify them; exit 1 if a mutant that is not equivalent lives."""
    os.environ.update(ENVIRONMENT)
    files = [Emitted(spec, name) for spec in specs for name in _files(spec)]
    work = [(file, one) for file in files for one in _drawn(file.spec, file.name, count, seed)]
    with Progress(console=Console(stderr=True), transient=True) as progress, ThreadPoolExecutor(jobs) as pool:
        task = progress.add_task("mutants", total=len(work))

        def became(file: Emitted, mutant: Mutant) -> Outcome:
            outcome = file.became(mutant)
            progress.advance(task)
            return outcome

        outcomes = list(pool.map(became, *zip(*work, strict=True)))
    _say(outcomes)
    if record:
        _record(outcomes)
    raise typer.Exit(1 if any(outcome.what == "lived" for outcome in outcomes) else 0)


class Emitted:
    """A file of a spec, and what it does as it is."""

    def __init__(self, spec: Path, name: str) -> None:
        self.spec, self.name = spec, name
        self._lock = threading.Lock()
        self._limit = 0.0
        self._loads = 0
        self._codes: list[str] = []

    def became(self, mutant: Mutant) -> Outcome:
        """What became of a mutant."""
        with self._lock:
            if not self._limit:
                self._measure()
        outcome = self._tried(mutant)
        if outcome.what != "lived":
            return outcome
        if outcome.loads > self._loads:
            return replace(outcome, what="slower")
        what, why = reason(outcome.file, mutant)
        if what:
            return replace(outcome, what=what, by=why)
        if self._tried(replace(mutant, new="(1 // 0)")).what == "lived":
            # What fails wherever it runs did not run.
            return replace(outcome, what="gpu", by="no case on the CPU comes there")
        return self._told_by_compiler(outcome) if mutant.kernel else outcome

    def _measure(self) -> None:
        """What the file does as it is, and in how many seconds: a mutant that hangs is found, too."""
        began = time.monotonic()
        as_it_is = self._apart("forkserver", tried, NOTHING)
        assert as_it_is.what == "lived", f"{as_it_is.file} is wrong as it is: {as_it_is.by}"
        self._limit, self._loads = 30 + 3 * (time.monotonic() - began), as_it_is.loads

    def _tried(self, mutant: Mutant) -> Outcome:
        try:
            outcome: Outcome = self._apart("forkserver", tried, mutant, self._limit)
        except multiprocessing.TimeoutError:
            return Outcome(f"{self.spec.stem}/{self.name}", mutant, "killed", "no end")
        return outcome

    def _told_by_compiler(self, outcome: Outcome) -> Outcome:
        """A mutant of the same machine code is none, and `kgen compile` finds one that has none."""
        with self._lock:
            self._codes = self._codes or self._apart("spawn", compiled, None)
        codes = self._apart("spawn", compiled, outcome.mutant)
        if codes == self._codes:
            return replace(outcome, what="equivalent", by="machine code")
        failed = [code for code in codes if code.startswith(ERROR) and code not in self._codes]
        return replace(outcome, what="killed", by=f"compiling: {failed[0]}") if failed else outcome

    def _apart(
        self, how: str, function: Callable[..., Any], mutant: Mutant | None, limit: float = SECONDS
    ) -> Any:
        """In a process of its own, which may hang or die."""
        context: Any = multiprocessing.get_context(how)
        if how == "forkserver":
            context.set_forkserver_preload(["mutating.running", "torch", "triton", "kgen.verify.integration"])
        with context.Pool(1) as pool:
            return pool.apply_async(function, (self.spec, self.name, mutant)).get(limit)


def _files(spec: Path) -> list[str]:
    return [name for name in ("triton.py", "hopper.py") if (ROOT / "generated" / spec.stem / name).exists()]


def _drawn(spec: Path, name: str, count: int, seed: int) -> list[Mutant]:
    """As many of each operator as there are of all, where it has so many."""
    text = (ROOT / "generated" / spec.stem / name).read_text()
    rng, found = random.Random(f"{spec.stem} {name} {seed}"), mutants(text)
    by_operator = {operator: [m for m in found if m.operator == operator] for operator in OPERATORS}
    chosen: list[Mutant] = []
    while len(chosen) < min(count, len(found)):
        for rest in by_operator.values():
            if rest and len(chosen) < count:
                chosen.append(rest.pop(rng.randrange(len(rest))))
    return chosen


def _say(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.what == "lived":
            print(f"lived: {outcome.file}:{outcome.mutant}")
    counts = Counter(outcome.what for outcome in outcomes)
    dead, lived = counts["killed"] + counts["gpu"], counts["lived"]
    said = ", ".join(f"{count} {what}" for what, count in counts.most_common())
    print(f"{said}: {dead / max(1, dead + lived):.1%} of those that change what comes out")


def _record(outcomes: list[Outcome]) -> None:
    report = json.loads(REPORT.read_text()) if REPORT.exists() else {}
    for file in dict.fromkeys(outcome.file for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.file == file]
        operators: dict[str, Counter[str]] = {}
        for outcome in own:
            operators.setdefault(outcome.mutant.operator, Counter())[outcome.what] += 1
        survivors = [
            {"mutant": str(o.mutant), "what": o.what, "why": o.by or UNEXPLAINED[o.what]}
            for o in own
            if o.what != "killed"
        ]
        report[file] = {"operators": operators, "survivors": survivors}
    REPORT.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    generated = ROOT / "generated"
    for spec in dict.fromkeys(outcome.file.partition("/")[0] for outcome in outcomes):
        # Kernels for Hopper are part of what is called.
        counts = Counter(outcome.what for outcome in outcomes if outcome.file.startswith(f"{spec}/"))
        path = generated / spec / "triton.py"
        ledger.record_mutated(generated, path, ledger.file_hash(path), counts, versions(("triton",)))


if __name__ == "__main__":
    typer.run(mutate)
