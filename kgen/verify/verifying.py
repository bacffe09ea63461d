"""`kgen verify`: run emitted kernels on hard inputs and compare them with float64."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kgen.diagnostics import Diagnostic, KgenError, MissingError, did_you_mean
from kgen.verify import ledger
from kgen.verify.costs import Costs
from kgen.verify.emitted import Emitted, require_emitted
from kgen.verify.families import chip_cases, family_of, problem_of
from kgen.verify.farm.sharding import WHOLE, Shard
from kgen.verify.farm.tasks import Hands, Here, Messages, Row, Task
from kgen.verify.found import Found, Interrupted, Told, all_that_ran, archs_built
from kgen.verify.interpreter import ENVIRONMENT
from kgen.verify.packages import altered, manifest_of
from kgen.verify.processes import WorkerError, messages
from kgen.verify.toolchain import Progress, describe, toolchain, versions

if TYPE_CHECKING:
    from kgen.verify.worker import Job

RESTARTS = 5
"""How often a job may lose its worker, for each pass that it has, before the cases that are left are given up."""


def verify_specs(
    loaded: Sequence[Any],
    generated: Path,
    device: str = "auto",
    jobs: int = 1,
    timeout: float = 300.0,
    quick: bool | None = None,
    progress: Progress | None = None,
    record: bool | None = None,
    skipped: Callable[[Emitted, str], None] | None = None,
    cases: Collection[str] | None = None,
    targets: Collection[str] | None = None,
    wrong: Callable[[dict[str, Any]], None] | None = None,
    result: Callable[[dict[str, Any]], None] | None = None,
    told: Callable[[Told], None] | None = None,
    built: Path | None = None,
    hands: Hands | None = None,
    shard: Shard = WHOLE,
) -> list[dict[str, Any]]:
    """Verify the emitted files of some specs, each in a process of its own, or with several `jobs` each pass.

    `hands` do that in place of `jobs` processes here, `shard` is the part of the files that is verified. `device` is
    `auto`, `cuda` or `cpu` (Triton's interpreter). `timeout` is in seconds, for one case. `quick` takes the small cases
    only; left out, it is true on the CPU. `record` writes the ledger; left out, it is true on `cuda`. Returns rows of
    spec, target, pass, case, ok, error, eager, ratio, seconds, message. A file that cannot run on the device is handed
    to `skipped`, with why; so are kernels for one chip beside a file that did not run. A row goes to `result`, and one
    that is not ok to `wrong`, as soon as it is there. `told` hears of the whole run. `cases` names those to run, of all
    passes; the ledger hears of whole runs alone, not of some cases. `targets` leaves out the files of others. With
    `built` the packages there run in the place of the Triton files, and the ledger does not hear of it unless `record`
    says so: then what a package has no machine code for is left out, and `skipped` is told. Raises
    `KgenError` for a spec that is not rendered and a case that no spec has, `MissingError` without torch, triton
    or the device, and where every file is skipped; a part of the whole may be such files, or none. When it is
    interrupted, it records what is whole, and what is wrong, and raises `Interrupted`.
    """
    if cases is not None and record:
        message = "only a run of every case is recorded"
        raise KgenError(Diagnostic("usage", message, hint="leave out `--case`, or add `--no-record`"))
    hands = Here(jobs) if hands is None else hands
    device, whole, work = files_to_run(loaded, generated, device, skipped, targets, hands, shard, built)
    quick = device == "cpu" if quick is None else quick
    recordable = record is None and cases is None and (built is None or device == "cuda")
    record = device == "cuda" and cases is None and built is None if record is None else record
    # Hash before running: a file that changes meanwhile must not inherit the verdict.
    hashes = {file: ledger.file_hash(file.path) for _, file in work}
    if built is not None:
        _require_as_built(built, hashes)
        if device == "cpu":
            _tell_interpreted(built, hashes, record, skipped)
    # A process takes seconds to import torch and triton: worth it only where another runs beside it. What is recorded
    # of a file is of one device: elsewhere it is one task.
    one_task = hands.far or hands.beside == 1
    job = partial(_job, built=built, device=device, quick=quick)
    jobs_to_do = [
        job(problem, file, groups)
        for problem, file in work
        for groups in ([_groups(problem)] if one_task else [(group,) for group in _groups(problem)])
    ]
    if cases is not None:
        _require_known(cases, [job(problem, file, _groups(problem)) for problem, file in whole])
        jobs_to_do = _chosen(jobs_to_do, cases)
    costs = Costs(case for job in jobs_to_do for case in job.cases)
    rows: dict[tuple[str, ...], list[Row]] = {}

    def heard(task: Task, row: Row) -> None:
        rows.setdefault(task.key, []).append(row)
        if "case" not in row:
            return
        costs.done((row["pass"], row["case"]), row.get("seconds"))
        if not (row.get("unbuilt") or row.get("unrun")):
            if result is not None:
                result(row)
            if wrong is not None and not row["ok"]:
                wrong(row)
        if progress is not None:
            progress(*costs.progress(), f"{row['spec']} {row['target']} {row['pass']} {row['case']}")

    do = partial(run_job, timeout=timeout, beside=hands.beside, compiles=not (built and record))
    tasks, interrupted = [_task(job, do) for job in jobs_to_do], False
    try:
        hands.run(tasks, heard)
    except KeyboardInterrupt:
        interrupted = True
    files = [_found(file, problem, jobs_to_do, built, device) for problem, file in work]
    for task in tasks:
        (own,) = (one for one in files if (one.emitted.spec, one.emitted.stem) == task.key[:2])
        own.add(rows.get(task.key, ()))
    if not interrupted:
        _tell_unable(files, skipped)
        if shard == WHOLE:
            _require_able(files)
    _leave_out(files, built, skipped)
    entered = [one.record(generated, hashes[one.emitted], built, quick=quick) for one in files if record]
    left = sum(one.cases - one.ended for one in files if not one.unable)
    if told is not None:
        ledger_file = Path(generated) / ledger.FILENAME if any(entered) else None
        told(Told(all_that_ran(files), ledger_file, recordable and not record and not interrupted))
    if interrupted:
        raise Interrupted([row for one in files for row in one.rows], left)
    return [row for one in files for row in one.rows]


def _found(file: Emitted, problem: Any, jobs: Sequence[Job], built: Path | None, device: str) -> Found:
    """A file of which nothing is known yet."""
    own = [job for job in jobs if (job.emitted.spec, job.emitted.stem) == (file.spec, file.stem)]
    chip = file.chip(problem)
    names = chip_cases(chip).case_names(problem) if chip else ()
    unused = "is left out where packages run" if built is not None and device == "cpu" else None
    return Found(file, sum(len(job.cases) for job in own), chip, names, unused=unused)


def _leave_out(
    files: Sequence[Found], built: Path | None, skipped: Callable[[Emitted, str], None] | None
) -> None:
    """Leave out the cases that nothing ran, and say so."""
    for one in files:
        one.leave_out_unrun()
        if (beside := one.not_run()) and skipped is not None:
            skipped(beside, str(one.unused))
        # Where a package has no machine code for the device at all, its cases have failed.
        if built is None or one.where is None or not archs_built(built, one):
            continue
        if (names := one.leave_out_unbuilt()) and skipped is not None:
            skipped(one.emitted, f"in cases that its package has no machine code for: {', '.join(names)}")


def _task(job: Job, work: Callable[..., Iterator[Row]]) -> Task:
    file, passes = job.emitted, dict.fromkeys(group for group, _ in job.cases)
    return Task((file.spec, file.stem, *passes), work, job, (file.path.parent,), job.device)


def run_job(
    job: Job, messages: Messages | None = None, *, timeout: float, beside: int, compiles: bool = True
) -> Iterator[dict[str, Any]]:
    """The rows of a job, where it is done: first `where` that is, as the ledger names it; or one row that says why its
    file is `unable` to run there. What `messages` stands for was done nowhere. Unless it `compiles`,
    packages take no compiler for what they have no machine code for."""
    if messages is None and (why := job.emitted.unable(job.device)):
        yield {"unable": why}
        return
    if messages is None:
        tools = job.emitted.runtime.tools
        yield {"where": {**describe(job.device), "versions": versions(tools), "toolchain": toolchain(tools)}}
    yield from _rows(job, timeout, beside, messages, compiles)


def files_to_run(
    loaded: Sequence[Any],
    generated: Path,
    device: str,
    skipped: Callable[[Emitted, str], None] | None,
    targets: Collection[str] | None,
    hands: Hands,
    shard: Shard,
    built: Path | None = None,
) -> tuple[str, list[tuple[Any, Emitted]], list[tuple[Any, Emitted]]]:
    """The device, and the emitted files of specs that run there, each with its problem: all, and those of the part.

    Which files other machines cannot run shows there. With `built`, they are those that the packages there are made of.
    Says and raises what `verify_specs` does.
    """
    for one in loaded:
        problem_of(one)  # a family without a reference is the first thing to say
    files = [(problem_of(one, f.target), f) for one in loaded for f in require_emitted(generated, one)]
    files = [(problem, file) for problem, file in files if targets is None or file.target in targets]
    if built is not None:
        files = [one for one in files if one[1].path.name in manifest_of(built, one[1].spec)["sources"]]
    if loaded and not files:
        message = f"no file is for the target {', '.join(targets or ())}"
        raise KgenError(Diagnostic("nothing-to-run", message))
    part = shard.of(files, lambda one: (one[1].spec, one[1].stem))
    device = hands.device(device)
    if hands.far:
        return device, files, part
    found = {file: Found(file, unable=file.unable(device)) for _, file in files}
    _tell_unable([found[file] for _, file in part], skipped)
    _require_able([*found.values()])

    def able(some: Sequence[tuple[Any, Emitted]]) -> list[tuple[Any, Emitted]]:
        return [one for one in some if not found[one[1]].unable]

    return device, able(files), able(part)


def _in_package(built: Path, file: Emitted) -> Emitted:
    """What stands for a file in the package of its spec."""
    return replace(file, path=Path(built) / file.spec / file.path.name)


def _require_as_built(built: Path, hashes: Mapping[Emitted, str]) -> None:
    """Raise `KgenError` where a package is not what was built of the emitted files as they are now."""
    for file, digest in hashes.items():
        hint = f"kgen build {file.spec} -o {built}"
        if manifest_of(built, file.spec)["sources"][file.path.name] != digest:
            message = f"the package `{file.spec}` is not of `{file.path}` as it is now"
            raise KgenError(Diagnostic("stale-package", message, hint=hint))
        if names := altered(built, file.spec):
            message = f"{names[0]} of the package `{file.spec}` is not what was built"
            raise KgenError(Diagnostic("stale-package", message, hint=hint))


def _tell_interpreted(
    built: Path, files: Iterable[Emitted], record: bool, skipped: Callable[[Emitted, str], None] | None
) -> None:
    """Say that no machine code runs on the CPU. Raises `KgenError` where that would be recorded."""
    if record:
        message, hint = "a package has no machine code for the CPU", "leave out `--record`"
        raise KgenError(Diagnostic("usage", message, hint=hint))
    for file in files if skipped is not None else ():
        why = "as machine code, which is for GPUs: Triton's interpreter runs what it was built from"
        skipped(_in_package(built, file), why)  # type: ignore[misc]


def _require_known(cases: Collection[str], jobs: Sequence[Job]) -> None:
    """Raise `KgenError` for a case that no job has."""
    known = {name for job in jobs for _, name in job.cases}
    if unknown := [name for name in cases if name not in known]:
        hint = did_you_mean(unknown[0], sorted(known)) or f"cases are: {', '.join(sorted(known))}"
        raise KgenError(Diagnostic("unknown-case", f"there is no case `{unknown[0]}`", hint=hint))


def _chosen(jobs: Sequence[Job], cases: Collection[str]) -> list[Job]:
    """The jobs with those cases alone."""
    chosen = (replace(job, cases=tuple(case for case in job.cases if case[1] in cases)) for job in jobs)
    return [job for job in chosen if job.cases]


def _tell_unable(files: Sequence[Found], skipped: Callable[[Emitted, str], None] | None) -> None:
    """Say which files cannot run."""
    for file in files:
        if file.unable and skipped is not None:
            skipped(file.emitted, file.unable)


def _require_able(files: Sequence[Found]) -> None:
    """Raise `MissingError` where none of some files can run."""
    if files and all(file.unable for file in files):
        message = f"`{files[0].emitted.path}` {files[0].unable}"
        hint = "`kgen compile` checks it without one"
        raise MissingError(Diagnostic("missing-device", message, hint=hint))


def _job(
    problem: Any, file: Emitted, groups: Sequence[str], *, built: Path | None, device: str, quick: bool
) -> Job:
    from kgen.verify.integration import OF_FILES  # imports torch
    from kgen.verify.worker import Job, case_names

    left_out = () if built is None else OF_FILES
    # Packages have machine code in place of what an interpreter runs.
    chip = file.chip(problem) if device == "cpu" and built is None else None
    small = chip_cases(chip).case_names(problem) if chip else ()
    found = tuple(
        (group, name)
        for group in groups
        for name in (*case_names(problem, group, device, quick), *small)
        if name not in left_out
    )
    runs = file if built is None else _in_package(built, file)
    return Job(problem, replace(runs, path=runs.path.resolve()), device, found)


def _rows(
    job: Job, timeout: float, jobs: int, instead: Messages | None = None, compiles: bool = True
) -> Iterator[dict[str, Any]]:
    """The rows of a job; a worker that is lost costs one case, and another takes over after it."""
    cores = max(1, (os.cpu_count() or 1) // jobs)
    environment: dict[str, str | None] = {"TRITON_INTERPRET": None, "OMP_NUM_THREADS": str(cores)}
    if job.device == "cpu":
        environment = {**ENVIRONMENT}
    if not compiles:
        environment["KGEN_NO_COMPILER"] = "1"  # of `kgen.build.runtime.folder`
    if jobs > 1:
        # By itself torch.compile begins a process for each core, in every worker.
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    left = list(job.cases)
    restarts = RESTARTS * len({group for group, _ in job.cases})
    for _ in range(restarts):
        if not left:
            return
        culprit: tuple[str, str] | None = left[0]
        trouble = "ended before its last case"
        try:
            for message in (instead or messages)(
                "kgen.verify.worker", replace(job, cases=tuple(left)), timeout, environment
            ):
                if "start" in message:
                    culprit = tuple(message["start"])
                elif "unused" in message:
                    yield message
                elif (case := (message.get("pass"), message.get("case"))) in left:
                    left.remove(case)
                    culprit = None  # whatever happens before the next case starts is nobody's fault
                    yield {**_place(job), **message}
        except WorkerError as error:
            trouble = str(error)
        if culprit in left:
            left.remove(culprit)
            yield _lost(job, culprit, trouble)
    for case in left:
        yield _lost(job, case, f"not run: the worker was lost {restarts} times")


def _lost(job: Job, case: tuple[str, str], message: str) -> dict[str, Any]:
    group, name = case
    numbers: dict[str, Any] = {"error": None, "eager": None, "ratio": None, "seconds": None, "outputs": {}}
    return {**_place(job), "pass": group, "case": name, "ok": False, **numbers, "message": message}


def _place(job: Job) -> dict[str, Any]:
    return {"spec": job.emitted.spec, "target": job.emitted.stem}


def _groups(problem: Any) -> tuple[str, ...]:
    return family_of(problem).groups(problem)
