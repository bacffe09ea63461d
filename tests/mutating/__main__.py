"""`scripts/mutate`: change emitted files, and count the changes that verification finds."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from pydantic import TypeAdapter, ValidationError
from support.running import parts

from kgen.cli import terminal
from kgen.cli.options import Command, PartOf, Ray
from kgen.cli.terminal import Format
from kgen.diagnostics import Diagnostic, KgenError
from kgen.verify import ledger
from kgen.verify.farm.opening import hands
from kgen.verify.farm.sharding import Shard
from kgen.verify.farm.tasks import Hands, Row, Task
from kgen.verify.toolchain import versions
from mutating import mutants as of_mutants
from mutating import on_gpu
from mutating.operators import OPERATORS, Mutant, mutants
from mutating.reasons import unseen
from mutating.running import ROOT, File, Outcome

REPORT = Path(__file__).parent / "report.json"
UNEXPLAINED = {"slower": "gives the same of more loads", "lived": "a hole"}
OF = "mutants"
AS_TEXT: dict[str, Any] = {"indent": 1, "sort_keys": True}

app = typer.Typer(pretty_exceptions_enable=False)


@app.command(cls=Command)
def mutate(
    specs: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Argument(help="Spec files whose emitted files are changed."),
    ] = None,
    count: Annotated[
        int, typer.Option(min=1, help="Mutants per file, drawn evenly from the operators.")
    ] = 40,
    seed: Annotated[int, typer.Option(help="Seed of the draw.")] = 0,
    jobs: parts.Jobs = parts.JOBS,
    gpu: Annotated[
        bool,
        typer.Option("--gpu", help="Run the mutants that the report marks for GPUs."),
    ] = False,
    record: Annotated[
        bool, typer.Option(help="Record the result in tests/mutating/report.json.")
    ] = True,
    ray: Ray = None,
    shard: PartOf = None,
    output: parts.Output = None,
    merge: parts.Merge = None,
) -> None:
    """Verify mutants of emitted files, each with one change.

    Exit 1 if a mutant that is not equivalent lives.
    """

    def run() -> int:
        part = Shard.parse(shard)
        if gpu and (ray is not None or shard is not None or merge):
            raise KgenError(
                Diagnostic("usage", "--gpu runs here, whole: it has no --ray, --shard and --merge")
            )
        if gpu:
            return _on_gpus(specs, jobs, record)
        if not specs and not merge:
            raise KgenError(
                Diagnostic("usage", "no spec is named", hint="scripts/mutate specs/causal.yaml")
            )
        if merge:
            outcomes = merged(merge)
        else:
            files = part.of(
                (file for spec in specs or [] for file in _files(spec)), lambda file: file.called
            )
            with hands(jobs, ray, of_mutants.CODE) as who:
                drawn = [
                    task
                    for file in files
                    for task in of_mutants.tasks(file, _drawn(file, count, seed))
                ]
                outcomes = tried(drawn, who)
        _say(outcomes)
        if shard is not None and not merge:
            results = {key(o): asdict(o) for o in outcomes}
            parts.write(output or Path(f"mutate-{part.number}-of-{part.count}.json"), OF, results)
        elif record:
            _record(outcomes)
        return int(any(outcome.what in ("lived", "lost") for outcome in outcomes))

    raise SystemExit(terminal.guarded(run, Format.TEXT))


def _on_gpus(specs: Sequence[Path] | None, jobs: int, record: bool) -> int:
    """Run the mutants that the report marks for a GPU, and print the outcomes."""
    import torch

    if not torch.cuda.is_available():
        raise KgenError(Diagnostic("missing-device", "there is no GPU"))
    report = json.loads(REPORT.read_text())
    named = specs or [
        ROOT / "specs" / f"{name}.yaml" for name in dict.fromkeys(n.split("/")[0] for n in report)
    ]
    files = [file for spec in named for file in _files(spec) if file.called in report]
    wanted = [
        (file, mutant) for file in files for mutant in on_gpu.marked(file, report[file.called])
    ]
    device = torch.cuda.get_device_name()
    rest = Counter((file.called, str(mutant)) for file, mutant in wanted)
    found: dict[tuple[str, str], str] = {}
    with terminal.progress_bar() as progress:
        for file, mutant, by in on_gpu.found_wrong(wanted, jobs, torch.cuda.device_count()):
            key = file.called, str(mutant)
            found[key] = alike(found[key], by) if key in found else by
            rest[key] -= 1
            progress(len(wanted) - rest.total(), len(wanted), file.called)
            if rest[key]:
                continue
            print(f"{found[key] or 'lived'}: {file.called}:{mutant}", flush=True)
            # Write each result at once, so that it is kept if the run is interrupted.
            if record and not found[key].startswith(on_gpu.LOST):
                told = told_by_gpu(report, key, found[key], device, unseen(file.called, mutant))
                REPORT.write_text(json.dumps(told, **AS_TEXT) + "\n")
                _enter(report, [file.spec])
    return int(any(not by or by.startswith(on_gpu.LOST) for by in found.values()))


def alike(one: str, other: str) -> str:
    """Combine the outcomes of two mutants with the same text in the report. Both must be found."""
    return min(one, other, key=lambda by: (by != on_gpu.RIGHT, not by.startswith(on_gpu.LOST)))


def told_by_gpu(
    report: dict[str, Any], key: tuple[str, str], by: str, device: str, why: str = ""
) -> dict[str, Any]:
    """Return the report with the GPU result of a mutant.

    An empty `by` means that the mutant lived.
    """
    called, mutant = key
    row, operator = report[called], mutant.split(": ", 1)[1].split(" in ")[0]
    for one in (one for one in row["survivors"] if one["mutant"] == mutant):
        if by:
            one["on"] = {"device": device, "by": by}
            continue
        one |= {"what": "lived", "why": why or f"nothing is wrong on {device}"}
        counts = Counter(row["operators"][operator])
        row["operators"][operator] = dict(counts - Counter(gpu=1) + Counter(lived=1))
    return report


def tried(tasks: Sequence[Task], who: Hands) -> list[Outcome]:
    """Return the outcomes of mutants, by file and place."""
    total, done = sum(len(task.job.mutants) for task in tasks), 0
    with terminal.progress_bar() as progress:

        def heard(task: Task, row: Row) -> None:
            nonlocal done
            done += 1
            progress(done, total, row["file"])

        found = [of_mutants.outcome(row) for one in who.run(tasks, heard) for row in one.rows]
    return sorted(found, key=key)


def key(outcome: Outcome) -> str:
    """Return a key that is unique even if two mutants on one line have the same text."""
    mutant = outcome.mutant
    return f"{outcome.file} {mutant.begin:08}-{mutant.end:08} {mutant}"


def merged(paths: Sequence[Path]) -> list[Outcome]:
    """Return the outcomes from the files of all parts, by file and place."""
    results = parts.merged(paths, OF, is_result)
    return [of_mutants.outcome(results[one]) for one in sorted(results)]


def is_result(name: str, result: Any) -> bool:
    """True if `result` is the entry of a part for this mutant."""
    try:
        outcome = _OUTCOME.validate_json(json.dumps(result), strict=True)
    except ValidationError:
        return False
    return name == key(outcome)


_OUTCOME = TypeAdapter(Outcome)


def _files(spec: Path) -> list[File]:
    folder = ROOT / "generated" / spec.stem
    there = [folder / name for name in ("triton.py", "hopper.py") if (folder / name).exists()]
    return [File(spec.stem, spec.read_text(encoding="utf-8"), path) for path in there]


def _drawn(file: File, count: int, seed: int) -> list[Mutant]:
    """Draw the same number of mutants per operator, as far as an operator has enough."""
    rng, found = (
        random.Random(f"{file.spec} {file.path.name} {seed}"),
        mutants(file.path.read_text()),
    )
    by_operator = {operator: [m for m in found if m.operator == operator] for operator in OPERATORS}
    chosen: list[Mutant] = []
    while len(chosen) < min(count, len(found)):
        for rest in by_operator.values():
            if rest and len(chosen) < count:
                chosen.append(rest.pop(rng.randrange(len(rest))))
    return chosen


def _say(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.what in ("lived", "lost"):
            print(f"{outcome.what}: {outcome.file}:{outcome.mutant}")
    counts = Counter(outcome.what for outcome in outcomes)
    dead, lived = counts["killed"], counts["lived"]
    said = ", ".join(f"{count} {what}" for what, count in counts.most_common())
    print(f"{said}: {dead / max(1, dead + lived):.1%} of those that tell on the CPU")


def _record(outcomes: list[Outcome]) -> None:
    # Keep the earlier results of a file if a mutant of it was lost.
    unknown = {outcome.file for outcome in outcomes if outcome.what == "lost"}
    outcomes = [outcome for outcome in outcomes if outcome.file not in unknown]
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
    REPORT.write_text(json.dumps(report, **AS_TEXT) + "\n")
    _enter(report, dict.fromkeys(outcome.file.partition("/")[0] for outcome in outcomes))


def _enter(report: Mapping[str, Any], specs: Iterable[str]) -> None:
    """Copy the counts of some specs from the report to the ledger."""
    generated = ROOT / "generated"
    for spec in specs:
        # A call also launches the Hopper kernels.
        of_spec = [row for file, row in report.items() if file.startswith(f"{spec}/")]
        counts = sum(
            (Counter(some) for row in of_spec for some in row["operators"].values()), Counter()
        )
        path = generated / spec / "triton.py"
        ledger.record_mutated(
            generated, path, ledger.file_hash(path), counts, versions(("triton",))
        )


if __name__ == "__main__":
    app()
