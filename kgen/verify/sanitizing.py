"""`kgen verify --sanitizer`: a call of each emitted file, with gradients where it has them, under compute-sanitizer.

It comes with the CUDA toolkit. memcheck finds reads and writes outside of any tensor, racecheck accesses to shared
memory that no barrier orders, in the portable kernels (those for Hopper it does not understand), initcheck reads of
what nobody wrote, synccheck barriers that not all threads reach.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError, MissingError, did_you_mean
from kgen.verify import ledger
from kgen.verify.emitted import Emitted
from kgen.verify.farm.sharding import WHOLE, Shard
from kgen.verify.farm.tasks import Hands, Here, Messages, Row, Task
from kgen.verify.found import Interrupted
from kgen.verify.processes import WorkerError, messages
from kgen.verify.toolchain import Progress, describe, versions
from kgen.verify.verifying import files_to_run

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PROGRAM = "compute-sanitizer"
FOUND = 86
"""The exit status that says that the tool found something."""


def sanitize_specs(
    loaded: Sequence[Any],
    generated: Path,
    tools: Sequence[str],
    device: str = "auto",
    jobs: int = 1,
    timeout: float = 300.0,
    progress: Progress | None = None,
    record: bool | None = None,
    skipped: Callable[[Emitted, str], None] | None = None,
    targets: Collection[str] | None = None,
    hands: Hands | None = None,
    shard: Shard = WHOLE,
    result: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Run the example call of the emitted files of some specs under some of `TOOLS`, a process for each.

    Returns rows of spec, target, tool, ok, seconds, message. `timeout` is in seconds, for one process. `record`,
    true on `cuda` if left out, enters in the ledger which tool found nothing on which device; `targets`, `skipped`,
    `result`, `hands` and `shard` are those of `verify_specs`. When it is interrupted, it records what it knows and
    raises `Interrupted`. Raises `KgenError` for an unknown tool and a spec that is not
    rendered, `MissingError` without compute-sanitizer, torch, triton or the device.
    """
    for tool in tools:
        if tool not in TOOLS:
            hint = did_you_mean(tool, TOOLS) or f"tools are: {', '.join(TOOLS)}"
            raise KgenError(Diagnostic("unknown-tool", f"compute-sanitizer has no tool `{tool}`", hint=hint))
    hands = Here(jobs) if hands is None else hands
    if not hands.far and shutil.which(PROGRAM) is None:
        hint = "it comes with the CUDA toolkit"
        raise MissingError(Diagnostic("missing-tool", f"`{PROGRAM}` is not on the PATH", hint=hint))
    device, _, files = files_to_run(loaded, generated, device, skipped, targets, hands, shard)
    record = device == "cuda" if record is None else record
    hashes = {file: ledger.file_hash(file.path) for _, file in files}
    do = partial(run_call, timeout=timeout)
    work = [(problem, file, tool) for problem, file in files for tool in tools]
    tasks = []
    for problem, file, tool in work:
        call = _Call(problem, replace(file, path=file.path.resolve()), device, tool)
        tasks.append(Task((file.spec, file.stem, tool), do, call, (call.file.path.parent,), device))
    found: dict[tuple[str, ...], dict[str, Any]] = {}

    def heard(task: Task, row: Row) -> None:
        found[task.key] = row
        if result is not None and row["ok"] is not None:
            result(row)
        if progress is not None:
            progress(len(found), len(tasks), " ".join(task.key))

    try:
        hands.run(tasks, heard)
    except KeyboardInterrupt:
        rows = _entered(work, tasks, found, generated, hashes, record, skipped)
        raise Interrupted(rows, len(tasks) - len(found)) from None
    return _entered(work, tasks, found, generated, hashes, record, skipped)


def _entered(
    work: Sequence[tuple[Any, Emitted, str]],
    tasks: Sequence[Task],
    found: Mapping[tuple[str, ...], dict[str, Any]],
    generated: Path,
    hashes: Mapping[Emitted, str],
    record: bool,
    skipped: Callable[[Emitted, str], None] | None,
) -> list[dict[str, Any]]:
    """The rows that were found, in the order of the tasks, entered in the ledger if they are to be recorded."""
    rows = []
    for (_, file, tool), task in zip(work, tasks, strict=True):
        if task.key not in found:
            continue
        row = found[task.key]
        where, why = row.pop("where"), row.pop("unable")
        if why and skipped is not None:
            skipped(file, why)
        if record and where:
            ledger.record_sanitized(generated, file.path, hashes[file], tool, row["ok"], **where)
        if row["ok"] is not None:
            rows.append(row)
    return rows


@dataclass(frozen=True)
class _Call:
    """The example call of a file, under one tool."""

    problem: Any
    file: Emitted
    device: str
    tool: str


def run_call(call: _Call, instead: Messages | None = None, *, timeout: float) -> Iterator[dict[str, Any]]:
    """The row of a call, with `where` that was, or why the file is `unable` to run there."""
    why = None if instead else call.file.unable(call.device)
    if not (why or instead) and shutil.which(PROGRAM) is None:
        why = f"needs `{PROGRAM}`"
    row = {"ok": None} if why else _row(call, timeout, instead or messages)
    done = not (why or instead)
    where = {**describe(call.device), "versions": versions(call.file.runtime.tools)} if done else {}
    yield {**row, "where": where, "unable": why}


def _row(call: _Call, timeout: float, messages: Messages) -> dict[str, Any]:
    from kgen.verify.worker import Job  # imports torch

    file, tool, device = call.file, call.tool, call.device
    job = Job(call.problem, file, device, (("call", tool),))
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kgen-") as folder:
        log = Path(folder) / "log"
        # Calls of the driver that fail are not errors of the kernel: packages try which entry points there are.
        command = [PROGRAM, "--tool", tool, "--error-exitcode", str(FOUND), "--report-api-errors", "no"]
        environment = {
            "TRITON_INTERPRET": "1" if device == "cpu" else None,
            # Each tensor is an allocation of its own then, and what lies outside of it is outside of memory.
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        }
        message, calls = "", 0
        try:
            command += ["--log-file", str(log)]
            calls = sum(1 for _ in messages("kgen.verify.call", job, timeout, environment, command))
        except WorkerError as error:
            message = f"{error}"
        report = log.read_text(errors="replace").splitlines() if log.exists() else []
    found = [line.removeprefix("=========").strip() for line in report]
    if not message and not (calls and any("SUMMARY" in line for line in found)):
        message = "the tool ended without a summary"
    if message.startswith(f"exit status {FOUND}"):
        message = "; ".join(line for line in found if line and not line.startswith("COMPUTE-SANITIZER"))
    seconds = round(time.perf_counter() - began, 3)
    place = {"spec": file.spec, "target": file.stem, "tool": tool}
    return {**place, "ok": not message, "seconds": seconds, "message": message[:2000]}
