"""`kgen verify --sanitizer`: run one call of each emitted file, with gradients, under
compute-sanitizer.

compute-sanitizer comes with the CUDA toolkit. memcheck finds accesses outside of tensors, initcheck
reads of uninitialized memory, synccheck barriers that not all threads reach. racecheck finds
unordered accesses to shared memory. It runs the portable kernels only, because it does not
understand mbarriers.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError, MissingError, did_you_mean
from kgen.verify import ledger
from kgen.verify.emitted import Emitted
from kgen.verify.events import Judged, LeftOut, Listener, Progressed, ignore
from kgen.verify.farm.tasks import Hands, Here, Messages, Row, Task
from kgen.verify.found import Interrupted
from kgen.verify.options import RunOptions
from kgen.verify.processes import WorkerError, messages
from kgen.verify.toolchain import describe, versions
from kgen.verify.verifying import files_to_run

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PROGRAM = "compute-sanitizer"
FOUND = 86
"""The exit status of a tool that found errors."""
WHOLE_RUN = RunOptions()


def sanitize_specs(
    loaded: Sequence[Any],
    generated: Path,
    tools: Sequence[str],
    options: RunOptions = WHOLE_RUN,
    hands: Hands | None = None,
    hear: Listener = ignore,
) -> list[dict[str, Any]]:
    """Run the example call of emitted files under some of `TOOLS`, each in its own process.

    Returns rows of spec, target, tool, ok, seconds, message. `hands` and `hear` are as in
    `verify_specs`. The ledger records tools without errors, by device. An interrupt records the
    results so far and raises `Interrupted`. Raises `KgenError` for an unknown tool and a spec that
    is not rendered, and `MissingError` without compute-sanitizer, torch, triton or the device.
    """
    for tool in tools:
        if tool not in TOOLS:
            hint = did_you_mean(tool, TOOLS) or f"tools are: {', '.join(TOOLS)}"
            raise KgenError(
                Diagnostic("unknown-tool", f"compute-sanitizer has no tool `{tool}`", hint=hint)
            )
    hands = Here() if hands is None else hands
    if not hands.far and shutil.which(PROGRAM) is None:
        hint = "install the CUDA toolkit"
        raise MissingError(Diagnostic("missing-tool", f"`{PROGRAM}` is not on the PATH", hint=hint))
    device, _, files = files_to_run(loaded, generated, options, hands, hear)
    record = device == "cuda" if options.record is None else options.record
    if record:
        ledger.require_readable(generated)
    hashes = {file: ledger.file_hash(file.path) for _, file in files}
    do = partial(run_call, timeout=options.timeout)
    tasks: dict[tuple[str, ...], Task] = {}
    for problem, file in files:
        for tool in tools:
            call = _Call(problem, replace(file, path=file.path.resolve()), device, tool)
            key = (file.spec, file.stem, tool)
            tasks[key] = Task(key, do, call, (call.file.path.parent,), device)
    found: dict[tuple[str, ...], dict[str, Any]] = {}

    def heard(task: Task, row: Row) -> None:
        found[task.key] = row
        if row["ok"] is not None:
            hear(Judged(row))
        hear(Progressed(len(found), len(tasks), " ".join(task.key)))

    interrupted = False
    try:
        hands.run([*tasks.values()], heard)
    except KeyboardInterrupt:
        interrupted = True
    own: dict[tuple[str, ...], Emitted] = {(file.spec, file.stem): file for _, file in files}
    ended = [(own[key[:2]], key[2], found[key]) for key in tasks if key in found]
    rows = _entered(ended, generated, hashes if record else {}, hear)
    if interrupted:
        raise Interrupted(rows, len(tasks) - len(found))
    return rows


def _entered(
    ended: Sequence[tuple[Emitted, str, dict[str, Any]]],
    generated: Path,
    hashes: Mapping[Emitted, str],
    hear: Listener,
) -> list[dict[str, Any]]:
    """Return the rows of files and tools that ran, in order.

    Rows of files with a hash are recorded.
    """
    rows = []
    for file, tool, row in ended:
        where, why = row.pop("where"), row.pop("unable")
        if why:
            hear(LeftOut(file, why))
        if where and file in hashes:
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


def run_call(
    call: _Call, instead: Messages | None = None, *, timeout: float
) -> Iterator[dict[str, Any]]:
    """Yield the row of a call with its place (`where`), or the reason why the file is `unable` to
    run.
    """
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
        # Failed driver calls are not kernel errors: packages probe for entry points.
        command = [
            PROGRAM,
            "--tool",
            tool,
            "--error-exitcode",
            str(FOUND),
            "--report-api-errors",
            "no",
        ]
        environment = {
            "TRITON_INTERPRET": "1" if device == "cpu" else None,
            # Each tensor then has its own allocation, so that memcheck sees accesses outside of it.
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
        message = "; ".join(
            line for line in found if line and not line.startswith("COMPUTE-SANITIZER")
        )
    seconds = round(time.perf_counter() - began, 3)
    place = {"spec": file.spec, "target": file.stem, "tool": tool}
    return {**place, "ok": not message, "seconds": seconds, "message": message[:2000]}
