"""`kgen verify`: run emitted kernels on hard inputs and compare them with float64."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from kgen.diagnostics import Diagnostic, KgenError, MissingError, did_you_mean
from kgen.verify import ledger
from kgen.verify.emitted import Emitted, require_emitted
from kgen.verify.families import family_of, problem_of
from kgen.verify.interpreter import ENVIRONMENT
from kgen.verify.processes import WorkerError, messages, threads
from kgen.verify.toolchain import Progress, describe, pick_device, toolchain, versions

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
) -> list[dict[str, Any]]:
    """Verify the emitted files of some specs, each in a process of its own, or with several `jobs` each pass.

    `device` is `auto`, `cuda` or `cpu` (Triton's interpreter). `timeout` is in seconds, for one case. `quick`
    takes the small cases only; left out, it is true on the CPU. `record` writes the ledger; left out, it is
    true on `cuda`. Returns rows of spec, target, pass, case, ok, error, eager, ratio, seconds, message. A file
    that cannot run on the device is handed to `skipped`, with why, and a row that is not ok to `wrong`, as soon as it
    is there. `cases` names those to run, of all passes;
    the ledger hears of whole runs alone, not of some cases. `targets` leaves out the files of others. With `built` the
    packages there run in the place of the Triton files, and the ledger does not hear of it. Raises
    `KgenError` for a spec that is not rendered and a case that no spec has, `MissingError` without torch, triton
    or the device, and where every file is skipped.
    """
    if cases is not None and record:
        message = "only a run of every case is recorded"
        raise KgenError(Diagnostic("usage", message, hint="leave out `--case`, or add `--no-record`"))
    if built is not None and record:
        message = "what is recorded is of emitted files, not of packages"
        raise KgenError(Diagnostic("usage", message, hint="leave out `--record`"))
    device, work = files_to_run(loaded, generated, device, skipped, targets if built is None else ["triton"])
    if built is not None:
        work = [(problem, _package(built, file)) for problem, file in work]
    quick = device == "cpu" if quick is None else quick
    record = device == "cuda" and cases is None and built is None if record is None else record
    # A process takes seconds to import torch and triton: worth it only where another runs beside it.
    tasks = [
        _job(problem, file, groups, device, quick)
        for problem, file in work
        for groups in ([_groups(problem)] if jobs == 1 else [(group,) for group in _groups(problem)])
    ]
    if built is not None:
        from kgen.verify.integration import OF_FILES  # imports torch

        # A package is more files than one that is emitted.
        tasks = [replace(job, cases=tuple(c for c in job.cases if c[1] not in OF_FILES)) for job in tasks]
    if cases is not None:
        tasks = _chosen(tasks, cases)
    total, done, lock = sum(len(job.cases) for job in tasks), 0, Lock()

    def run(job: Job) -> list[dict[str, Any]]:
        nonlocal done
        rows = []
        for row in _rows(job, timeout, max(1, jobs)):
            rows.append(row)
            with lock:
                done += 1
                if wrong is not None and not row["ok"]:
                    wrong(row)
                if progress is not None:
                    progress(done, total, f"{row['spec']} {row['target']} {row['pass']} {row['case']}")
        return rows

    # Hash before running: a file that changes meanwhile must not inherit the verdict.
    hashes = {file: ledger.file_hash(file.path) for _, file in work}
    with threads(jobs) as pool:
        results = list(pool.map(run, tasks))
    rows = [row for result in results for row in result]
    if record:
        for _, file in work:
            own = [row for row in rows if (row["spec"], row["target"]) == (file.spec, file.stem)]
            ledger.record(
                generated,
                file.path,
                hashes[file],
                own,
                quick=quick,
                **describe(device),
                versions=versions(file.runtime.tools),
                toolchain=toolchain(file.runtime.tools),
            )
    return rows


def files_to_run(
    loaded: Sequence[Any],
    generated: Path,
    device: str,
    skipped: Callable[[Emitted, str], None] | None,
    targets: Collection[str] | None,
) -> tuple[str, list[tuple[Any, Emitted]]]:
    """The device, and the emitted files of specs that run there, each with its problem.

    Says and raises what `verify_specs` does.
    """
    for one in loaded:
        problem_of(one)  # a family without a reference is the first thing to say
    files = [(problem_of(one, f.target), f) for one in loaded for f in require_emitted(generated, one)]
    files = [(problem, file) for problem, file in files if targets is None or file.target in targets]
    if loaded and not files:
        message = f"no file is for the target {', '.join(targets or ())}"
        raise KgenError(Diagnostic("nothing-to-run", message))
    device = pick_device(device)
    work = [(problem, file) for problem, file in files if not file.unable(device)]
    _tell([file for _, file in files], device, skipped)
    return device, work


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


def _tell(files: Sequence[Emitted], device: str, skipped: Callable[[Emitted, str], None] | None) -> None:
    """Say which files cannot run. Raises `MissingError` where none can."""
    reasons = [(file, why) for file in files if (why := file.unable(device))]
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


def _rows(job: Job, timeout: float, jobs: int) -> Iterator[dict[str, Any]]:
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
            for message in messages(
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
