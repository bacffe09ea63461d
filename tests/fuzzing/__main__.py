"""`scripts/fuzz`: try random specs, seed by seed, and record the outcomes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, get_args

import typer
from pydantic import TypeAdapter, ValidationError
from support.running import parts
from typing_extensions import TypedDict

from fuzzing import seeds as of_seeds
from fuzzing.ledger import Ledger, generator, of_family
from fuzzing.running import Outcome
from kgen.cli import terminal
from kgen.cli.options import Command, PartOf, Ray
from kgen.cli.terminal import Format
from kgen.diagnostics import Diagnostic, KgenError
from kgen.verify.farm.opening import hands
from kgen.verify.farm.sharding import Shard
from kgen.verify.farm.tasks import Hands, Row, Task

app = typer.Typer(pretty_exceptions_enable=False)

Family = Literal["attention", "norm", "chunk_output", "linear_attention"]


@app.command(cls=Command)
def fuzz(
    seed: Annotated[
        int, typer.Option(help="First seed. Default: the first that the ledger lacks.")
    ] = -1,
    count: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 100,
    family: Annotated[
        Optional[Family],  # noqa: UP045
        typer.Option(help="Try only seeds whose specs belong to this family."),
    ] = None,
    jobs: parts.Jobs = parts.JOBS,
    device: Annotated[
        Literal["cpu", "cuda"],
        typer.Option(help="Use a GPU, or the Triton and Gluon interpreters."),
    ] = "cpu",
    expressions: Annotated[
        bool,
        typer.Option(
            "--expressions", help="Compare masks and scores with their text; run no kernels."
        ),
    ] = False,
    proofs: Annotated[
        bool,
        typer.Option(
            "--proofs", help="Prove random specs, by default of attention; run no kernels."
        ),
    ] = False,
    kept: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="With --proofs: a file with one line per seed. Its seeds are skipped."),
    ] = None,
    record: Annotated[
        bool,
        typer.Option(help="Record the outcomes in the JSON files of tests/fuzzing/."),
    ] = True,
    ray: Ray = None,
    shard: PartOf = None,
    output: parts.Output = None,
    merge: parts.Merge = None,
) -> None:
    """Run the kernels of random specs, and compare them with float64.

    Another spelling must give the same kernel. Failing specs are reduced and printed. Exit 1 if one
    fails.
    """

    def run() -> int:
        if family and expressions:
            raise KgenError(
                Diagnostic("usage", "`--expressions` cannot be combined with `--family`")
            )
        if proofs:
            return proved(range(max(seed, 0), max(seed, 0) + count), jobs, kept, record, family)
        if expressions:
            return compared(seed, count, jobs, record)
        part, ledger = Shard.parse(shard), Ledger.read(device)
        first = ledger.next(family) if seed < 0 else seed
        if merge:
            found = merged(merge)
        else:
            every = of_family(family, first, count) if family else range(first, first + count)
            chosen = part.of(every, lambda one: f"{one:012}")
            with hands(jobs, ray, of_seeds.CODE) as who:
                found = tried(chosen, who, device)
        failed = {outcome.seed: least for outcome, least in found if least is not None}
        outcomes = [outcome for outcome, _ in found]
        for outcome in outcomes:
            if outcome.seed in failed:
                terminal.line(f"seed {outcome.seed}: {outcome.what}")
                terminal.line(f"{failed[outcome.seed].message}\n{failed[outcome.seed].spec}")
        if shard is not None and not merge:
            place = output or Path(f"fuzz-{part.number}-of-{part.count}.json")
            write(place, found)
        elif record:
            ledger.enter(outcomes, failed, family)
        counts = Counter(outcome.what for outcome in outcomes)
        terminal.line(", ".join(f"{number} {what}" for what, number in sorted(counts.items())))
        return int(bool(failed))

    raise SystemExit(terminal.guarded(run, Format.TEXT))


def compared(seed: int, count: int, jobs: int, record: bool) -> int:
    """Compare the forms of random expressions with their texts. Return the exit code."""
    from fuzzing import comparing

    entered = comparing.Record.read()
    first = entered.tried if seed < 0 else seed
    found: list[comparing.Compared] = []
    with terminal.progress_bar() as progress:
        for those in comparing.run(
            first, count, jobs, lambda done: progress(done, count, "compared")
        ):
            found += those
            if record:
                entered.enter(those)
            for one in those:
                if one.failed:
                    terminal.line(f"seed {one.seed}: {one.what}\n{one.message}")
    terminal.line(comparing.told(found))
    return int(any(one.failed for one in found))


def proved(
    seeds: Sequence[int],
    jobs: int,
    kept: Path | None,
    record: bool,
    family: Family | None,
) -> int:
    """Prove the specs of some seeds. Return the exit code."""
    from fuzzing import proofs

    known = [one for one in get_args(proofs.Family) if one == (family or "attention")]
    if not known:
        hint = f"families with proofs: {', '.join(get_args(proofs.Family))}"
        message = f"`--proofs` cannot be combined with `--family {family}`"
        raise KgenError(Diagnostic("usage", message, hint=hint))
    with terminal.progress_bar() as progress:
        found = proofs.run(
            seeds, jobs, kept, lambda done: progress(done, len(seeds), "proved"), known[0]
        )
    if record:
        proofs.enter(found, proofs.record_of(known[0]), known[0])
    for one in found:
        if one.failed:
            terminal.line("\n".join((f"seed {one.seed}: {one.what}", *one.found, one.spec)))
    terminal.line(proofs.told(found))
    return int(any(one.failed for one in found))


Found = tuple[Outcome, Optional[Outcome]]  # noqa: UP045
"""Outcome of a seed, and of the smallest spec that fails in the same way."""


def tried(seeds: Sequence[int], who: Hands, device: str = "cpu") -> list[Found]:
    """Return the outcomes of some seeds in ascending order."""
    done = 0
    with terminal.progress_bar() as progress:

        def heard(task: Task, row: Row) -> None:
            nonlocal done
            done += 1
            progress(done, len(seeds), f"seed {row['seed']}")

        beside = max(who.beside, 8) if who.far else who.beside
        found = who.run(of_seeds.tasks(seeds, beside, device), heard)
        outcomes = sorted(
            (Outcome(**row) for one in found for row in one.rows), key=lambda one: one.seed
        )
        failed = who.run([of_seeds.smaller_one(one) for one in outcomes if one.failed])
    least = {one.task.job.seeds[0]: Outcome(**row) for one in failed for row in one.rows}
    return [(outcome, least.get(outcome.seed)) for outcome in outcomes]


def parts_of() -> str:
    """Return the name of the work that parts share.

    Another generator draws other specs for the same seeds.
    """
    return f"seeds of {generator()}"


def write(path: Path, found: Sequence[Found]) -> None:
    """Write the outcomes of the seeds of a part."""
    results = {
        str(o.seed): {"outcome": o.row(), "least": least and least.row()} for o, least in found
    }
    parts.write(path, parts_of(), results)


def merged(paths: Sequence[Path]) -> list[Found]:
    """Return the outcomes from the files of all parts, by seed."""
    results = parts.merged(paths, parts_of(), is_result)
    found = [
        (Outcome(**r["outcome"]), Outcome(**r["least"]) if r["least"] else None)
        for r in results.values()
    ]
    return sorted(found, key=lambda one: one[0].seed)


def is_result(key: str, result: Any) -> bool:
    """True if `result` is the entry of a part for this seed."""
    try:
        told = _RESULT.validate_json(json.dumps(result), strict=True)
    except ValidationError:
        return False
    return told["outcome"].seed >= 0 and key == str(told["outcome"].seed)


class _Result(TypedDict):
    outcome: Outcome
    least: Optional[Outcome]  # noqa: UP045


_RESULT = TypeAdapter(_Result)


if __name__ == "__main__":
    app()
