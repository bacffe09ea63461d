"""`kgen verify`: run emitted kernels on difficult inputs and compare them with float64."""

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
from kgen.verify.events import Ended, Judged, LeftOut, Listener, Progressed, ignore
from kgen.verify.families import chip_cases, family_of, problem_of
from kgen.verify.farm.sharding import WHOLE
from kgen.verify.farm.tasks import Hands, Here, Messages, Row, Task
from kgen.verify.found import Found, Interrupted, OfChip, all_that_ran, archs_built
from kgen.verify.interpreter import ENVIRONMENT
from kgen.verify.options import RunOptions, VerifyOptions
from kgen.verify.packages import altered, manifest_of
from kgen.verify.processes import WorkerError, messages
from kgen.verify.toolchain import describe, toolchain, versions

if TYPE_CHECKING:
    from kgen.verify.worker import Job

RESTARTS = 5
"""Number of workers that a job may lose for each of its passes, before its remaining cases fail."""
EVERY_CASE = VerifyOptions()


def verify_specs(
    loaded: Sequence[Any],
    generated: Path,
    options: VerifyOptions = EVERY_CASE,
    hands: Hands | None = None,
    hear: Listener = ignore,
) -> list[Row]:
    """Verify the emitted files of some specs, each in its own process.

    With several concurrent tasks, each pass of a file has its own process. `hands` runs the tasks,
    by default one process here. Returns rows of spec, target, pass, case, ok, error, eager, ratio,
    seconds, message.

    `hear` gets an event for each row, each file or case that does not run, and the end of the run.
    Raises `KgenError` for a spec that is not rendered and an unknown case. Raises `MissingError`
    without torch, triton or the device, and if every file is skipped; with a shard, all files may
    be skipped. An interrupt records files whose cases have all run, and failures, and raises
    `Interrupted`.
    """
    if options.cases is not None and options.record:
        message = "only a run of every case is recorded"
        raise KgenError(
            Diagnostic("usage", message, hint="leave out `--case`, or add `--no-record`")
        )
    hands = Here() if hands is None else hands
    device, whole, work = files_to_run(loaded, generated, options, hands, hear, options.built)
    recordable = _recordable(options, device)
    options = _settled(options, device)
    if options.record:
        ledger.require_readable(generated)
    # Hash before running: a file that changes during the run must not get the verdict.
    hashes = {file: ledger.file_hash(file.path) for _, file in work}
    if options.built is not None:
        _require_as_built(options.built, hashes)
        if device == "cpu":
            _tell_interpreted(options.built, hashes, bool(options.record), hear)
    jobs = _jobs(whole, work, options, one_task=hands.far or hands.beside == 1)
    rows, interrupted = _run(jobs, options, hands, hear)
    files = [_found(file, problem, jobs, options) for problem, file in work]
    for key, some in rows.items():
        (own,) = (one for one in files if (one.emitted.spec, one.emitted.stem) == key[:2])
        own.add(some)
    if not interrupted:
        _tell_unable(files, hear)
        if options.shard == WHOLE:
            _require_able(files)
    _leave_out(files, options.built, hear)
    recorded = _recorded(files, generated, hashes, options)
    hear(Ended(all_that_ran(files), recorded, recordable and not interrupted))
    found = [row for one in files for row in one.rows]
    if interrupted:
        raise Interrupted(found, sum(one.cases - one.ended for one in files if not one.unable))
    return found


def _recordable(options: VerifyOptions, device: str) -> bool:
    """True if the run is not recorded, and would be with `record`."""
    entered = _settled(options, device).record
    asks = options.record is None and options.cases is None
    return asks and not entered and (options.built is None or device == "cuda")


def _settled(options: VerifyOptions, device: str) -> VerifyOptions:
    """Return the options with defaults that depend on the device."""
    whole_run = device == "cuda" and options.cases is None and options.built is None
    return replace(
        options,
        device=device,
        quick=device == "cpu" if options.quick is None else options.quick,
        record=whole_run if options.record is None else options.record,
    )


def _jobs(
    whole: Sequence[tuple[Any, Emitted]],
    work: Sequence[tuple[Any, Emitted]],
    options: VerifyOptions,
    *,
    one_task: bool,
) -> list[Job]:
    """Return a job for each file if `one_task`, else for each pass.

    Raises `KgenError` for a case that none of the `whole` files has.
    """
    job = partial(_job, built=options.built, device=options.device, quick=bool(options.quick))
    # Importing torch and triton takes seconds, so passes are split only for concurrent processes. A
    # record has one device, so on several machines a file is one task.
    found = [
        job(problem, file, groups)
        for problem, file in work
        for groups in ([_groups(problem)] if one_task else [(group,) for group in _groups(problem)])
    ]
    if options.cases is None:
        return found
    _require_known(options.cases, [job(problem, file, _groups(problem)) for problem, file in whole])
    return _chosen(found, options.cases)


def _run(
    jobs: Sequence[Job], options: VerifyOptions, hands: Hands, hear: Listener
) -> tuple[dict[tuple[str, ...], list[Row]], bool]:
    """Run jobs; return the rows by task, and True after an interrupt."""
    costs = Costs(case for job in jobs for case in job.cases)
    compiles = not (options.built and options.record)
    do = partial(run_job, timeout=options.timeout, beside=hands.beside, compiles=compiles)
    tasks = [_task(job, do) for job in jobs]
    rows: dict[tuple[str, ...], list[Row]] = {task.key: [] for task in tasks}

    def heard(task: Task, row: Row) -> None:
        rows[task.key].append(row)
        if "case" not in row:
            return
        costs.done((row["pass"], row["case"]), row.get("seconds"))
        if not (row.get("unbuilt") or row.get("unrun")):
            hear(Judged(row))
        hear(
            Progressed(
                *costs.progress(), f"{row['spec']} {row['target']} {row['pass']} {row['case']}"
            )
        )

    try:
        hands.run(tasks, heard)
    except KeyboardInterrupt:
        return rows, True
    return rows, False


def _recorded(
    files: Sequence[Found], generated: Path, hashes: Mapping[Emitted, str], options: VerifyOptions
) -> Path | None:
    """Record results; return the path of the ledger if a file is entered as right."""
    entered = [
        one.record(generated, hashes[one.emitted], options.built, quick=bool(options.quick))
        for one in files
        if options.record
    ]
    return Path(generated) / ledger.FILENAME if any(entered) else None


def _found(file: Emitted, problem: Any, jobs: Sequence[Job], options: VerifyOptions) -> Found:
    """Return the empty result of a file."""
    own = [job for job in jobs if (job.emitted.spec, job.emitted.stem) == (file.spec, file.stem)]
    interpreted = options.built is not None and options.device == "cpu"
    unused = "does not run with packages" if interpreted else None
    chips = tuple(
        OfChip(chip, chip_cases(chip).case_names(problem), unused) for chip in file.chips(problem)
    )
    return Found(file, sum(len(job.cases) for job in own), chips)


def _leave_out(files: Sequence[Found], built: Path | None, hear: Listener) -> None:
    """Remove the cases that did not run, and report them."""
    for one in files:
        one.leave_out_unrun()
        for beside, why in one.not_run():
            hear(LeftOut(beside, why))
        # Without any machine code for the device, the cases of a package have failed.
        if built is None or one.where is None or not archs_built(built, one):
            continue
        if names := one.leave_out_unbuilt():
            why = f"in cases without machine code in its package: {', '.join(names)}"
            hear(LeftOut(one.emitted, why))


def _task(job: Job, work: Callable[..., Iterator[Row]]) -> Task:
    file, passes = job.emitted, dict.fromkeys(group for group, _ in job.cases)
    return Task((file.spec, file.stem, *passes), work, job, (file.path.parent,), job.device)


def run_job(
    job: Job,
    messages: Messages | None = None,
    *,
    timeout: float,
    beside: int,
    compiles: bool = True,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a job. Runs where the job runs.

    The first row has its place (`where`) as in the ledger. A single row has the reason if the file
    is `unable` to run. With `messages`, the job does not run. Unless `compiles`, packages do not
    compile missing machine code.
    """
    if messages is None and (why := job.emitted.unable(job.device)):
        yield {"unable": why}
        return
    if messages is None:
        tools = job.emitted.runtime.tools
        yield {
            "where": {
                **describe(job.device),
                "versions": versions(tools),
                "toolchain": toolchain(tools),
            }
        }
    yield from _rows(job, timeout, beside, messages, compiles)


def files_to_run(
    loaded: Sequence[Any],
    generated: Path,
    options: RunOptions,
    hands: Hands,
    hear: Listener,
    built: Path | None = None,
) -> tuple[str, list[tuple[Any, Emitted]], list[tuple[Any, Emitted]]]:
    """Return the device, all emitted files that run there, and the files of the shard, each with
    its problem.

    On other machines, unsupported files are found during the run. With `built`, only sources of
    packages are returned. Reports events and raises errors as `verify_specs`.
    """
    targets = options.targets
    for one in loaded:
        problem_of(one)  # first report a family without a reference
    files = [
        (problem_of(one, f.target), f) for one in loaded for f in require_emitted(generated, one)
    ]
    files = [
        (problem, file) for problem, file in files if targets is None or file.target in targets
    ]
    if built is not None:
        files = [
            one for one in files if one[1].path.name in manifest_of(built, one[1].spec)["sources"]
        ]
    if loaded and not files:
        message = f"no file has the target {', '.join(targets or ())}"
        raise KgenError(Diagnostic("nothing-to-run", message))
    part = options.shard.of(files, lambda one: (one[1].spec, one[1].stem))
    device = hands.device(options.device)
    if hands.far:
        return device, files, part
    found = {file: Found(file, unable=file.unable(device)) for _, file in files}
    _tell_unable([found[file] for _, file in part], hear)
    _require_able([*found.values()])

    def able(some: Sequence[tuple[Any, Emitted]]) -> list[tuple[Any, Emitted]]:
        return [one for one in some if not found[one[1]].unable]

    return device, able(files), able(part)


def _in_package(built: Path, file: Emitted) -> Emitted:
    """Return the file in the package of its spec."""
    return replace(file, path=Path(built) / file.spec / file.path.name)


def _require_as_built(built: Path, hashes: Mapping[Emitted, str]) -> None:
    """Raise `KgenError` if a package was not built from the current emitted files, or was
    changed.
    """
    for file, digest in hashes.items():
        hint = f"kgen build {file.spec} -o {built}"
        if manifest_of(built, file.spec)["sources"][file.path.name] != digest:
            message = f"the package `{file.spec}` was not built from the current `{file.path}`"
            raise KgenError(Diagnostic("stale-package", message, hint=hint))
        if names := altered(built, file.spec):
            message = f"{names[0]} of the package `{file.spec}` changed after the build"
            raise KgenError(Diagnostic("stale-package", message, hint=hint))


def _tell_interpreted(built: Path, files: Iterable[Emitted], record: bool, hear: Listener) -> None:
    """Report that machine code does not run on the CPU. Raises `KgenError` with `record`."""
    if record:
        message, hint = "a package has no machine code for the CPU", "leave out `--record`"
        raise KgenError(Diagnostic("usage", message, hint=hint))
    for file in files:
        why = "as machine code, which needs a GPU: Triton's interpreter runs the sources"
        hear(LeftOut(_in_package(built, file), why))


def _require_known(cases: Collection[str], jobs: Sequence[Job]) -> None:
    """Raise `KgenError` for a case that no job has."""
    known = {name for job in jobs for _, name in job.cases}
    if unknown := [name for name in cases if name not in known]:
        hint = did_you_mean(unknown[0], sorted(known)) or f"cases are: {', '.join(sorted(known))}"
        raise KgenError(Diagnostic("unknown-case", f"there is no case `{unknown[0]}`", hint=hint))


def _chosen(jobs: Sequence[Job], cases: Collection[str]) -> list[Job]:
    """Return the jobs with only these cases."""
    chosen = (
        replace(job, cases=tuple(case for case in job.cases if case[1] in cases)) for job in jobs
    )
    return [job for job in chosen if job.cases]


def _tell_unable(files: Sequence[Found], hear: Listener) -> None:
    """Report files that cannot run."""
    for file in files:
        if file.unable:
            hear(LeftOut(file.emitted, file.unable))


def _require_able(files: Sequence[Found]) -> None:
    """Raise `MissingError` if no file can run."""
    if files and all(file.unable for file in files):
        message = f"`{files[0].emitted.path}` {files[0].unable}"
        hint = "`kgen compile` checks it without a GPU"
        raise MissingError(Diagnostic("missing-device", message, hint=hint))


def _job(
    problem: Any,
    file: Emitted,
    groups: Sequence[str],
    *,
    built: Path | None,
    device: str,
    quick: bool,
) -> Job:
    from kgen.verify.integration import OF_FILES  # imports torch
    from kgen.verify.worker import Job, case_names

    left_out = () if built is None else OF_FILES
    # Packages have machine code, which no interpreter runs.
    chips = file.chips(problem) if device == "cpu" and built is None else ()
    small = [name for chip in chips for name in chip_cases(chip).case_names(problem)]
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
    """Yield the rows of a job. A lost worker fails one case, and another worker continues."""
    cores = max(1, (os.cpu_count() or 1) // jobs)
    environment: dict[str, str | None] = {"TRITON_INTERPRET": None, "OMP_NUM_THREADS": str(cores)}
    if job.device == "cpu":
        environment = {**ENVIRONMENT}
    if not compiles:
        environment["KGEN_NO_COMPILER"] = "1"  # read by `kgen.build.runtime.folder`
    if jobs > 1:
        # The default of torch.compile is a process for each core, in every worker.
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
                    culprit = None  # an error before the next start belongs to no case
                    yield {**_place(job), **message}
        except WorkerError as error:
            trouble = str(error)
        if culprit in left:
            left.remove(culprit)
            yield _lost(job, culprit, trouble)
    for case in left:
        yield _lost(job, case, f"not run: {restarts} workers were lost")


def _lost(job: Job, case: tuple[str, str], message: str) -> dict[str, Any]:
    group, name = case
    numbers: dict[str, Any] = {
        "error": None,
        "eager": None,
        "ratio": None,
        "seconds": None,
        "outputs": {},
    }
    return {**_place(job), "pass": group, "case": name, "ok": False, **numbers, "message": message}


def _place(job: Job) -> dict[str, Any]:
    return {"spec": job.emitted.spec, "target": job.emitted.stem}


def _groups(problem: Any) -> tuple[str, ...]:
    return family_of(problem).groups(problem)
