"""`scripts/mutate`: mutants of emitted files, and whether verification finds them."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from kgen.verify import ledger
from kgen.verify.interpreter import ENVIRONMENT
from kgen.verify.toolchain import versions
from mutating.operators import OPERATORS, Mutant, mutants
from mutating.running import ROOT, Outcome, machine_code, tried

REPORT = Path(__file__).parent / "report.json"
LIMIT = 90
"""Seconds that a mutant may take; one that hangs is found, too."""


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
    console = Console(stderr=True)
    work = [
        (spec, name, one)
        for spec in specs
        for name in _files(spec)
        for one in _drawn(spec, name, count, seed)
    ]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mutating.running", "torch", "triton", "kgen.verify.integration"])
    outcomes = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("mutants", total=len(work))
        for begin in range(0, len(work), jobs):
            outcomes += _together(context, work[begin : begin + jobs])
            progress.advance(task, len(work[begin : begin + jobs]))
    codes: dict[tuple[Path, str], str] = {}
    for i, ((spec, name, mutant), outcome) in enumerate(zip(work, outcomes, strict=True)):
        if outcome.what == "lived":
            outcomes[i] = _unless_equivalent(context, codes, spec, name, mutant, outcome)
    _say(outcomes)
    if record:
        _record(outcomes)
    raise typer.Exit(1 if any(outcome.what == "lived" for outcome in outcomes) else 0)


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


def _together(
    context: multiprocessing.context.BaseContext, work: list[tuple[Path, str, Mutant]]
) -> list[Outcome]:
    """Each in a process of its own, which may hang or die."""
    pools = [context.Pool(1) for _ in work]
    waits = [pool.apply_async(tried, args) for pool, args in zip(pools, work, strict=True)]
    found = []
    for wait, pool, (spec, name, mutant) in zip(waits, pools, work, strict=True):
        try:
            found.append(wait.get(LIMIT))
        except multiprocessing.TimeoutError:
            found.append(Outcome(f"{spec.stem}/{name}", mutant, "killed", "no end"))
        pool.terminate()
    return found


def _unless_equivalent(
    context: multiprocessing.context.BaseContext,
    codes: dict[tuple[Path, str], str],
    spec: Path,
    name: str,
    mutant: Mutant,
    outcome: Outcome,
) -> Outcome:
    """A mutant of the same machine code is none; what the launcher does has no machine code."""
    os.environ.pop("TRITON_INTERPRET", None)
    fresh = multiprocessing.get_context("spawn")
    with fresh.Pool(1) as pool:
        if (spec, name) not in codes:
            codes[spec, name] = pool.apply(machine_code, (spec, name, None))
        same = pool.apply(machine_code, (spec, name, mutant)) == codes[spec, name]
    in_kernel = mutant.operator != "launch" and not _is_launcher(spec, name, mutant)
    return replace(outcome, what="equivalent", by="machine code") if same and in_kernel else outcome


def _is_launcher(spec: Path, name: str, mutant: Mutant) -> bool:
    lines = (ROOT / "generated" / spec.stem / name).read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"def {mutant.function}("))
    return "jit" not in lines[at - 1]


def _say(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.what == "lived":
            m = outcome.mutant
            print(f"lived: {outcome.file}:{m.line} {m.operator} in {m.function}: `{m.old}` -> `{m.new}`")
    counts = Counter(outcome.what for outcome in outcomes)
    dead, lived = counts["killed"], counts["lived"]
    print(
        f"{dead} killed, {lived} lived, {counts['equivalent']} equivalent: {dead / max(1, dead + lived):.1%}"
    )


def _record(outcomes: list[Outcome]) -> None:
    report = json.loads(REPORT.read_text()) if REPORT.exists() else {}
    for file in dict.fromkeys(outcome.file for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.file == file]
        operators: dict[str, Counter[str]] = {}
        for outcome in own:
            operators.setdefault(outcome.mutant.operator, Counter())[outcome.what] += 1
        report[file] = {
            "operators": operators,
            "lived": [
                f"{o.mutant.operator} in {o.mutant.function}: `{o.mutant.old}` -> `{o.mutant.new}`"
                for o in own
                if o.what == "lived"
            ],
        }
    REPORT.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    generated = ROOT / "generated"
    for spec in dict.fromkeys(outcome.file.partition("/")[0] for outcome in outcomes):
        # Kernels for Hopper are part of what is called.
        counts = Counter(outcome.what for outcome in outcomes if outcome.file.startswith(f"{spec}/"))
        path = generated / spec / "triton.py"
        ledger.record_mutated(generated, path, ledger.file_hash(path), counts, versions(("triton",)))


if __name__ == "__main__":
    typer.run(mutate)
