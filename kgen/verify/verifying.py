"""`kgen verify`: run emitted kernels on hard inputs and compare them with float64."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kgen.diagnostics import Diagnostic, KgenError, MissingError, did_you_mean
from kgen.verify import ledger
from kgen.verify.emitted import Emitted, require_emitted
from kgen.verify.families import family_of, problem_of
from kgen.verify.farm.sharding import WHOLE, Shard
from kgen.verify.farm.tasks import Hands, Here, Messages, Row, Task
from kgen.verify.interpreter import ENVIRONMENT
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
    built: Path | None = None,
    hands: Hands | None = None,
    shard: Shard = WHOLE,
) -> list[dict[str, Any]]:
    """Verify the emitted files of some specs, each in a process of its own, or with several `jobs` each pass.

    `hands` do that in place of `jobs` processes here, `shard` is the part of the files that is verified. `device` is
    `auto`, `cuda` or `cpu` (Triton's interpreter). `timeout` is in seconds, for one case. `quick` takes the small cases
    only; left out, it is true on the CPU. `record` writes the ledger; left out, it is true on `cuda`. Returns rows of
    spec, target, pass, case, ok, error, eager, ratio, seconds, message. A file that cannot run on the device is handed
    to `skipped`, with why, and a row that is not ok to `wrong`, as soon as it is there. `cases` names those to run, of
    all passes; the ledger hears of whole runs alone, not of some cases. `targets` leaves out the files of others. With
    `built` the packages there run in the place of the Triton files, and the ledger does not hear of it. Raises
    `KgenError` for a spec that is not rendered and a case that no spec has, `MissingError` without torch, triton
    or the device, and where every file is skipped.
    """
    if cases is not None and record:
        message = "only a run of every case is recorded"
        raise KgenError(Diagnostic("usage", message, hint="leave out `--case`, or add `--no-record`"))
    if built is not None and record:
        message = "what is recorded is of emitted files, not of packages"
        raise KgenError(Diagnostic("usage", message, hint="leave out `--record`"))
    hands = Here(jobs) if hands is None else hands
    only = targets if built is None else ["triton"]
    device, work = files_to_run(loaded, generated, device, skipped, only, hands, shard)
    if built is not None:
        work = [(problem, _package(built, file)) for problem, file in work]
    quick = device == "cpu" if quick is None else quick
    record = device == "cuda" and cases is None and built is None if record is None else record
    # A process takes seconds to import torch and triton: worth it only where another runs beside it. What is recorded
    # of a file is of one device: elsewhere it is one task.
    whole = hands.far or hands.beside == 1
    jobs_to_do = [
        _job(problem, file, groups, device, quick)
        for problem, file in work
        for groups in ([_groups(problem)] if whole else [(group,) for group in _groups(problem)])
    ]
    if built is not None:
        from kgen.verify.integration import OF_FILES  # imports torch

        # A package is more files than one that is emitted.
        jobs_to_do = [
            replace(job, cases=tuple(c for c in job.cases if c[1] not in OF_FILES)) for job in jobs_to_do
        ]
    if cases is not None:
        jobs_to_do = _chosen(jobs_to_do, cases)
    total, done = sum(len(job.cases) for job in jobs_to_do), 0

    def heard(task: Task, row: Row) -> None:
        nonlocal done
        if "case" not in row:
            return
        done += 1
        if wrong is not None and not row["ok"]:
            wrong(row)
        if progress is not None:
            progress(done, total, f"{row['spec']} {row['target']} {row['pass']} {row['case']}")

    # Hash before running: a file that changes meanwhile must not inherit the verdict.
    hashes = {file: ledger.file_hash(file.path) for _, file in work}
    do = partial(run_job, timeout=timeout, beside=hands.beside)
    found = hands.run([_task(job, do) for job in jobs_to_do], heard)
    files = [_Found(file) for _, file in work]
    for one in found:
        (own,) = (file for file in files if (file.emitted.spec, file.emitted.stem) == one.task.key[:2])
        own.add(one.rows)
    _tell_unable(files, skipped)
    for file in files if record else []:
        if file.where is not None:
            ledger.record(
                generated, file.emitted.path, hashes[file.emitted], file.rows, quick=quick, **file.where
            )
    return [row for one in found for row in one.rows if "case" in row]


@dataclass
class _Found:
    """What came of one file: its rows, and where they are of; or why it could not run there."""

    emitted: Emitted
    where: dict[str, Any] | None = None
    unable: str | None = None

    def __post_init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, rows: Sequence[Row]) -> None:
        """The rows of one of its tasks."""
        for row in rows:
            if "where" in row:
                self.where = row["where"]
            elif "unable" in row:
                self.unable = row["unable"]
            else:
                self.rows.append(row)


def _task(job: Job, work: Callable[..., Iterator[Row]]) -> Task:
    file, passes = job.emitted, dict.fromkeys(group for group, _ in job.cases)
    return Task((file.spec, file.stem, *passes), work, job, (file.path.parent,), job.device)


def run_job(
    job: Job, messages: Messages | None = None, *, timeout: float, beside: int
) -> Iterator[dict[str, Any]]:
    """The rows of a job, where it is done, and in the end `where` that was, as the ledger names it; or one row that
    says why its file is `unable` to run there. What `messages` stands for was done nowhere."""
    if messages is None and (why := job.emitted.unable(job.device)):
        yield {"unable": why}
        return
    yield from _rows(job, timeout, beside, messages)
    if messages is not None:
        return
    tools = job.emitted.runtime.tools
    yield {"where": {**describe(job.device), "versions": versions(tools), "toolchain": toolchain(tools)}}


def files_to_run(
    loaded: Sequence[Any],
    generated: Path,
    device: str,
    skipped: Callable[[Emitted, str], None] | None,
    targets: Collection[str] | None,
    hands: Hands,
    shard: Shard,
) -> tuple[str, list[tuple[Any, Emitted]]]:
    """The device, and the emitted files of specs that run there, each with its problem.

    Which files other machines cannot run shows there. Says and raises what `verify_specs` does.
    """
    for one in loaded:
        problem_of(one)  # a family without a reference is the first thing to say
    files = [(problem_of(one, f.target), f) for one in loaded for f in require_emitted(generated, one)]
    files = [(problem, file) for problem, file in files if targets is None or file.target in targets]
    if loaded and not files:
        message = f"no file is for the target {', '.join(targets or ())}"
        raise KgenError(Diagnostic("nothing-to-run", message))
    files = shard.of(files, lambda one: (one[1].spec, one[1].stem))
    device = hands.device(device)
    if hands.far:
        return device, files
    found = [_Found(file, unable=file.unable(device)) for _, file in files]
    _tell_unable(found, skipped)
    return device, [one for one, of in zip(files, found, strict=True) if not of.unable]


def _package(built: Path, file: Emitted) -> Emitted:
    """What `kgen build` made of a file. Raises `KgenError` where it did not."""
    path = Path(built) / file.spec / "__init__.py"
    if not path.is_file():
        message, hint = f"`{path}` does not exist", f"kgen build {file.spec} -o {built}"
        raise KgenError(Diagnostic("not-built", message, hint=hint))
    return replace(file, path=path)


def _chosen(tasks: Sequence[Job], cases: Collection[str]) -> list[Job]:
    """The jobs with those cases alone. Raises `KgenError` for a case that none has."""
    known = {name for job in tasks for _, name in job.cases}
    if unknown := [name for name in cases if name not in known]:
        hint = did_you_mean(unknown[0], sorted(known)) or f"cases are: {', '.join(sorted(known))}"
        raise KgenError(Diagnostic("unknown-case", f"there is no case `{unknown[0]}`", hint=hint))
    chosen = (replace(job, cases=tuple(case for case in job.cases if case[1] in cases)) for job in tasks)
    return [job for job in chosen if job.cases]


def _tell_unable(files: Sequence[_Found], skipped: Callable[[Emitted, str], None] | None) -> None:
    """Say which files cannot run. Raises `MissingError` where none can."""
    reasons = [(file.emitted, file.unable) for file in files if file.unable]
    for file, why in reasons:
        if skipped is not None:
            skipped(file, why)
    if files and len(reasons) == len(files):
        file, why = reasons[0]
        hint = "`kgen compile` checks it without one"
        raise MissingError(Diagnostic("missing-device", f"`{file.path}` {why}", hint=hint))


def _job(problem: Any, file: Emitted, groups: Sequence[str], device: str, quick: bool) -> Job:
    from kgen.verify.worker import Job, case_names  # imports torch

    found = tuple((group, name) for group in groups for name in case_names(problem, group, device, quick))
    return Job(problem, replace(file, path=file.path.resolve()), device, found)


def _rows(job: Job, timeout: float, jobs: int, instead: Messages | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a job; a worker that is lost costs one case, and another takes over after it."""
    cores = max(1, (os.cpu_count() or 1) // jobs)
    environment: dict[str, str | None] = {"TRITON_INTERPRET": None, "OMP_NUM_THREADS": str(cores)}
    if job.device == "cpu":
        environment = {**ENVIRONMENT}
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
