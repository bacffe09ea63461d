"""`kgen compile`: compile emitted Triton kernels for architectures that need not be here.

The emitted launcher decides what to compile: a worker calls it on small CPU tensors, with `JITFunction.run`
replaced by one that compiles what would have been launched, exactly as Triton would specialise it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError
from kgen.verify import ledger
from kgen.verify.problem import Problem, problem_of, require_emitted
from kgen.verify.processes import WorkerError, messages
from kgen.verify.toolchain import Progress, require, versions

KIB = 1024
SHARED_LIMITS = {80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}
"""Bytes of shared memory that one block may have, by compute capability."""

DEFAULT_ARCHS = ("sm_80", "sm_90", "sm_100")


COLUMNS = ("spec", "kernel", "variant", "arch", "registers", "spills", "shared", "limit", "ok", "error")


@dataclass(frozen=True)
class CompileJob:
    """What one worker compiles."""

    problem: Problem
    path: Path
    capability: int


def capability(arch: str) -> int:
    """`sm_90` or `sm_90a` -> 90. Raises `KgenError` for an architecture whose limits are not known."""
    match = re.fullmatch(r"sm_(\d+)a?", arch)
    if match is None or int(match[1]) not in SHARED_LIMITS:
        known = ", ".join(f"sm_{cc}" for cc in SHARED_LIMITS)
        raise KgenError(Diagnostic("unknown-arch", f"unknown architecture `{arch}`", hint=f"one of {known}"))
    return int(match[1])


def compile_specs(
    loaded: Sequence[Any],
    generated: Path,
    archs: Sequence[str] = DEFAULT_ARCHS,
    jobs: int = 1,
    timeout: float = 600.0,
    progress: Progress | None = None,
    record: bool = False,
) -> list[dict[str, Any]]:
    """Compile every kernel of some specs for every architecture; no GPU is needed.

    Returns rows of spec, kernel, variant, arch, registers, spills (bytes of local memory a thread), shared
    and limit (bytes a block), ok, error. `ok` is false where it does not compile or needs more shared memory
    than the architecture has. `timeout` is in seconds, for one kernel. `record` enters the result in the
    ledger. Raises `KgenError` for a spec that is not rendered, `MissingError` without torch or triton.
    """
    require("torch", "triton")
    work = [(problem_of(one), require_emitted(generated, one)) for one in loaded]
    tasks = [(CompileJob(p, path.resolve(), capability(arch)), arch) for p, path in work for arch in archs]
    hashes = {path.resolve(): ledger.file_hash(path) for _, path in work}
    done, lock = 0, Lock()

    def run(task: tuple[CompileJob, str]) -> list[dict[str, Any]]:
        nonlocal done
        rows = list(_rows(*task, timeout))
        with lock:
            done += 1
            if progress is not None:
                progress(done, len(tasks), f"{task[0].problem.name} {task[1]}")
        return rows

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        results = list(pool.map(run, tasks))
    if record:
        for (job, arch), rows in zip(tasks, results, strict=True):
            place = Path(generated).resolve()
            ledger.record_compiled(place, job.path, hashes[job.path], rows, arch=arch, versions=versions())
    return [row for rows in results for row in rows]


def _rows(job: CompileJob, arch: str, timeout: float) -> Iterator[dict[str, Any]]:
    limit = SHARED_LIMITS[job.capability]
    environment = {"TRITON_INTERPRET": None}

    def row(**found: Any) -> dict[str, Any]:
        unknown = {"kernel": "", "variant": "", "registers": None, "spills": None, "shared": None}
        place = {"spec": job.problem.name, "arch": arch, "limit": limit}
        ok = found["error"] is None
        return {key: {**unknown, **place, **found, "ok": ok}[key] for key in COLUMNS}

    found = 0
    trouble = None
    try:
        for message in messages("kgen.verify.compile_worker", job, timeout, environment):
            found += 1
            if message["error"] is None and message["shared"] > limit:
                message["error"] = f"needs {message['shared']} bytes of shared memory, {arch} has {limit}"
            yield row(**message)
    except WorkerError as error:
        trouble = str(error)
    if trouble or not found:
        yield row(error=trouble or "launches no kernel")
