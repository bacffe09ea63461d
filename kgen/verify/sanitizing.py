"""`kgen verify --sanitizer`: a call of each emitted file, with gradients where it has them, under compute-sanitizer.

It comes with the CUDA toolkit. memcheck finds reads and writes outside of any tensor, racecheck accesses to shared
memory that no barrier orders, initcheck reads of what nobody wrote, synccheck barriers that not all threads reach.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError, MissingError, did_you_mean
from kgen.verify import ledger
from kgen.verify.emitted import Emitted
from kgen.verify.processes import WorkerError, messages, threads
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
) -> list[dict[str, Any]]:
    """Run the example call of the emitted files of some specs under some of `TOOLS`, a process for each.

    Returns rows of spec, target, tool, ok, seconds, message. `timeout` is in seconds, for one process. `record`,
    true on `cuda` if left out, enters in the ledger which tool found nothing on which device; `targets` and `skipped`
    are those of `verify_specs`. Raises `KgenError` for an unknown tool and a spec that is not rendered,
    `MissingError` without compute-sanitizer, torch, triton or the device.
    """
    for tool in tools:
        if tool not in TOOLS:
            hint = did_you_mean(tool, TOOLS) or f"tools are: {', '.join(TOOLS)}"
            raise KgenError(Diagnostic("unknown-tool", f"compute-sanitizer has no tool `{tool}`", hint=hint))
    if shutil.which(PROGRAM) is None:
        hint = "it comes with the CUDA toolkit"
        raise MissingError(Diagnostic("missing-tool", f"`{PROGRAM}` is not on the PATH", hint=hint))
    device, files = files_to_run(loaded, generated, device, skipped, targets)
    record = device == "cuda" if record is None else record
    hashes = {file: ledger.file_hash(file.path) for _, file in files}
    work = [(problem, file, tool) for problem, file in files for tool in tools]
    done = 0

    def run(item: tuple[Any, Emitted, str]) -> dict[str, Any]:
        nonlocal done
        row = _row(*item, device, timeout)
        done += 1
        if progress is not None:
            progress(done, len(work), f"{row['spec']} {row['target']} {row['tool']}")
        return row

    with threads(jobs) as pool:
        rows = list(pool.map(run, work))
    if record:
        for (_, file, tool), row in zip(work, rows, strict=True):
            ledger.record_sanitized(
                generated,
                file.path,
                hashes[file],
                tool,
                row["ok"],
                **describe(device),
                versions=versions(file.runtime.tools),
            )
    return rows


def _row(problem: Any, file: Emitted, tool: str, device: str, timeout: float) -> dict[str, Any]:
    from kgen.verify.worker import Job  # imports torch

    job = Job(problem, replace(file, path=file.path.resolve()), device, (("call", tool),))
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
