"""`kgen compile`: compile emitted kernels for architectures that need not be here.

Each target has a worker of its own (`Runtime.compiler`) that says a row for each binary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError, did_you_mean, shown
from kgen.sizes import SHARED_LIMITS
from kgen.verify import ledger
from kgen.verify.emitted import Emitted, require_emitted
from kgen.verify.families import problem_of
from kgen.verify.processes import WorkerError, messages, threads
from kgen.verify.toolchain import Progress, require, versions

SUFFIXES = {"": 0, "a": 90, "f": 100}
"""Of an architecture: for that chip alone, and for its family; the least compute capability that has each."""
ARCHS = {f"sm_{cc}{suffix}": cc for cc in SHARED_LIMITS for suffix, least in SUFFIXES.items() if cc >= least}
"""What can be compiled for, and its compute capability."""

DEFAULT_ARCHS = ("sm_80", "sm_90", "sm_100")

COLUMNS = (
    "spec",
    "target",
    "kernel",
    "variant",
    "arch",
    "registers",
    "spills",
    "shared",
    "limit",
    "ok",
    "error",
)


@dataclass(frozen=True)
class CompileJob:
    """What one worker compiles."""

    problem: Any
    emitted: Emitted
    arch: str

    @property
    def capability(self) -> int:
        """The architecture as a number: 90 for `sm_90a`."""
        return capability(self.arch)


def capability(arch: str) -> int:
    """`sm_90` or `sm_90a` -> 90. Raises `KgenError` for an architecture whose limits are not known."""
    if arch not in ARCHS:
        hint = did_you_mean(arch, ARCHS) or f"one of {', '.join(ARCHS)}"
        raise KgenError(Diagnostic("unknown-arch", f"unknown architecture {shown(arch)}", hint=hint))
    return ARCHS[arch]


def compile_specs(
    loaded: Sequence[Any],
    generated: Path,
    archs: Sequence[str] = DEFAULT_ARCHS,
    jobs: int = 1,
    timeout: float = 600.0,
    progress: Progress | None = None,
    record: bool = False,
    targets: Collection[str] | None = None,
) -> list[dict[str, Any]]:
    """Compile every kernel of some specs for every architecture; no GPU is needed.

    A file that is for one architecture is compiled for that one, where it is among `archs` (`sm_90` stands for
    `sm_90a` too). `targets` leaves out the files of others.

    Returns rows of spec, target, kernel, variant, arch, registers, spills (bytes of local memory a thread), shared
    and limit (bytes a block), ok, error. `ok` is false where it does not compile or needs more shared memory
    than the architecture has. `timeout` is in seconds, for one kernel. `record` enters the result in the
    ledger. Raises `KgenError` for a spec that is not rendered, `MissingError` without torch, triton or the package
    of a target.
    """
    archs = list(dict.fromkeys(archs))
    for arch in archs:
        capability(arch)
    require("torch", "triton")
    work = [(problem_of(one, f.target), f) for one in loaded for f in require_emitted(generated, one)]
    work = [(p, f) for p, f in work if f.runtime.compiler and (targets is None or f.target in targets)]
    tasks = [
        CompileJob(p, replace(f, path=f.path.resolve()), arch)
        for p, f in work
        for arch in _archs(f, archs)
        # The launcher of a file refuses older chips too.
        if capability(arch) >= getattr(p, "least_capability", 0)
    ]
    if loaded and not tasks:
        only = (
            ", ".join(f"`{file.path.name}` is for {_least(problem, file)}" for problem, file in work) or None
        )
        raise KgenError(
            Diagnostic("nothing-to-compile", "no file is for these targets and architectures", hint=only)
        )
    for runtime in {job.emitted.runtime: None for job in tasks}:
        if runtime.needs:
            require(runtime.needs, extra=runtime.extra)
    hashes = {job.emitted: ledger.file_hash(job.emitted.path) for job in tasks}
    done, lock = 0, Lock()

    def run(job: CompileJob) -> list[dict[str, Any]]:
        nonlocal done
        rows = list(_rows(job, timeout))
        with lock:
            done += 1
            if progress is not None:
                progress(done, len(tasks), f"{job.emitted.spec} {job.emitted.stem} {job.arch}")
        return rows

    with threads(jobs) as pool:
        results = list(pool.map(run, tasks))
    if record:
        place = Path(generated).resolve()
        for job, rows in zip(tasks, results, strict=True):
            file, digest = job.emitted, hashes[job.emitted]
            ledger.record_compiled(
                place, file.path, digest, rows, arch=job.arch, versions=versions(file.runtime.tools)
            )
    return [row for rows in results for row in rows]


def _least(problem: Any, file: Emitted) -> str:
    """Which chips a file is for."""
    return file.arch or f"sm_{getattr(problem, 'least_capability', 0)} or newer"


def _archs(file: Emitted, asked: Sequence[str]) -> Sequence[str]:
    """Those of the architectures asked for that a file is for."""
    if file.arch is None:
        return asked
    return [file.arch] if capability(file.arch) in map(capability, asked) else []


def _rows(job: CompileJob, timeout: float) -> Iterator[dict[str, Any]]:
    limit, arch = SHARED_LIMITS[job.capability], job.arch
    environment = {"TRITON_INTERPRET": None}

    def row(**found: Any) -> dict[str, Any]:
        unknown = {"kernel": "", "variant": "", "registers": None, "spills": None, "shared": None}
        place = {"spec": job.emitted.spec, "target": job.emitted.stem, "arch": arch, "limit": limit}
        ok = found["error"] is None
        return {key: {**unknown, **place, **found, "ok": ok}[key] for key in COLUMNS}

    found = 0
    trouble = None
    try:
        for message in messages(job.emitted.runtime.compiler or "", job, timeout, environment):
            found += 1
            if message["error"] is None and message["shared"] > limit:
                message["error"] = f"needs {message['shared']} bytes of shared memory, {arch} has {limit}"
            yield row(**message)
    except WorkerError as error:
        trouble = str(error)
    if trouble or not found:
        yield row(error=trouble or "launches no kernel")
