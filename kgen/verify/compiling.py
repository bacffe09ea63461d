"""`kgen compile`: compile emitted kernels for architectures without a GPU.

Each target has its own worker (`Runtime.compiler`), which prints a row for each binary.
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
from kgen.verify.events import Listener, Progressed, ignore
from kgen.verify.families import problem_of
from kgen.verify.processes import WorkerError, messages, threads
from kgen.verify.toolchain import require, versions

SUFFIXES = {"": 0, "a": 90, "f": 100}
"""Suffixes of architectures, and the least compute capability that has each: `a` for one chip, `f`
for its family.
"""
ARCHS = {
    f"sm_{cc}{suffix}": cc
    for cc in SHARED_LIMITS
    for suffix, least in SUFFIXES.items()
    if cc >= least
}
"""The architectures to compile for, with their compute capabilities."""

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
    """The work of one compiling worker."""

    problem: Any
    emitted: Emitted
    arch: str

    @property
    def capability(self) -> int:
        """The architecture as a number: 90 for `sm_90a`."""
        return capability(self.arch)


def capability(arch: str) -> int:
    """Return 90 for `sm_90` and `sm_90a`. Raises `KgenError` for an unknown architecture."""
    if arch not in ARCHS:
        hint = did_you_mean(arch, ARCHS) or f"one of {', '.join(ARCHS)}"
        raise KgenError(
            Diagnostic("unknown-arch", f"unknown architecture {shown(arch)}", hint=hint)
        )
    return ARCHS[arch]


@dataclass(frozen=True)
class CompileOptions:
    """The kernels to compile, and the architectures to compile them for."""

    archs: Sequence[str] = DEFAULT_ARCHS
    """Names of architectures, for example `sm_90`."""
    jobs: int = 1
    """Number of concurrent workers."""
    timeout: float = 600.0
    """Time limit for one kernel, in seconds."""
    record: bool = False
    """True to enter the result in the ledger."""
    targets: Collection[str] | None = None
    """The targets whose files are compiled; None for all."""


DEFAULT = CompileOptions()


def compile_specs(
    loaded: Sequence[Any],
    generated: Path,
    options: CompileOptions = DEFAULT,
    hear: Listener = ignore,
) -> list[dict[str, Any]]:
    """Compile every kernel of some specs for every architecture, without a GPU.

    A file for one architecture is compiled for that one, if `options.archs` contains it (`sm_90`
    includes `sm_90a`). Returns rows of spec, target, kernel, variant, arch, registers, spills
    (bytes of local memory per thread), shared and limit (bytes per block), ok, error. `ok` is false
    if the kernel does not compile, or needs more shared memory than the architecture has. `hear`
    gets an event for each file and architecture. Raises `KgenError` for a spec that is not
    rendered, and `MissingError` without torch, triton or the package of a target.
    """
    jobs = _jobs(loaded, generated, options)
    for runtime in {job.emitted.runtime: None for job in jobs}:
        if runtime.needs:
            require(runtime.needs, extra=runtime.extra)
    if options.record:
        ledger.require_readable(generated)
    hashes = {job.emitted: ledger.file_hash(job.emitted.path) for job in jobs}
    done, lock = 0, Lock()

    def run(job: CompileJob) -> list[dict[str, Any]]:
        nonlocal done
        rows = list(_rows(job, options.timeout))
        with lock:
            done += 1
            hear(Progressed(done, len(jobs), f"{job.emitted.spec} {job.emitted.stem} {job.arch}"))
        return rows

    with threads(options.jobs) as pool:
        results = list(pool.map(run, jobs))
    if options.record:
        place = Path(generated).resolve()
        for job, rows in zip(jobs, results, strict=True):
            file, digest = job.emitted, hashes[job.emitted]
            ledger.record_compiled(
                place, file.path, digest, rows, arch=job.arch, versions=versions(file.runtime.tools)
            )
    return [row for rows in results for row in rows]


def _jobs(loaded: Sequence[Any], generated: Path, options: CompileOptions) -> list[CompileJob]:
    """Pair each file with each of its architectures. Raises `KgenError` if there are none."""
    archs, targets = list(dict.fromkeys(options.archs)), options.targets
    for arch in archs:
        capability(arch)
    require("torch", "triton")
    work = [
        (problem_of(one, f.target), f) for one in loaded for f in require_emitted(generated, one)
    ]
    work = [
        (p, f) for p, f in work if f.runtime.compiler and (targets is None or f.target in targets)
    ]
    jobs = [
        CompileJob(p, replace(f, path=f.path.resolve()), arch)
        for p, f in work
        for arch in _archs(f, archs)
        # The launcher of a file refuses older GPUs, too.
        if capability(arch) >= getattr(p, "least_capability", 0)
    ]
    if loaded and not jobs:
        only = [f"`{file.path.name}` is for {_least(problem, file)}" for problem, file in work]
        message = "no file has these targets and architectures"
        raise KgenError(Diagnostic("nothing-to-compile", message, hint=", ".join(only) or None))
    return jobs


def _least(problem: Any, file: Emitted) -> str:
    """The GPUs that a file supports, as text."""
    return file.arch or f"sm_{getattr(problem, 'least_capability', 0)} or newer"


def _archs(file: Emitted, asked: Sequence[str]) -> Sequence[str]:
    """The requested architectures that a file supports."""
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
                message["error"] = (
                    f"needs {message['shared']} bytes of shared memory, {arch} has {limit}"
                )
            yield row(**message)
    except WorkerError as error:
        trouble = str(error)
    if trouble or not found:
        yield row(error=trouble or "launches no kernel")
