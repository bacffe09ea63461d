"""`kgen bench`: emitted kernels against their peers, in one interleaved run for each spec."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kgen.bench.plot import plot
from kgen.diagnostics import Diagnostic, KgenError
from kgen.verify.problem import Problem, problem_of, require_emitted
from kgen.verify.processes import WorkerError, messages
from kgen.verify.toolchain import Progress, pick_device

if TYPE_CHECKING:
    from kgen.bench.worker import BenchJob

PEERS = ("flex", "flex-autotune", "sdpa", "eager")


@dataclass(frozen=True)
class Shape:
    """The size of a benchmark; KV heads follow from the spec's `gqa`."""

    batch: int = 2
    heads: int = 16
    length: int = 8192

    @classmethod
    def parse(cls, text: str) -> Shape:
        """`2x16x8192`. Raises `KgenError` for anything else."""
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
        if match is None:
            hint = "BATCHxHEADSxLENGTH, for example 2x16x8192"
            raise KgenError(Diagnostic("bad-shape", f"`{text}` is not a shape", hint=hint))
        return cls(*(int(number) for number in match.groups()))


def bench_specs(
    loaded: Sequence[Any],
    generated: Path,
    against: Sequence[str] = ("flex", "sdpa"),
    shape: Shape | None = None,
    output: Path | None = Path("benchmarks"),
    progress: Progress | None = None,
    device: str = "cuda",
    timeout: float = 900.0,
) -> list[dict[str, Any]]:
    """Time the emitted files of some specs against peers (of `PEERS`).

    Returns rows of spec, pass, peer, milliseconds, tflops, ratio (the peer's time over kgen's: above one kgen
    is faster), quartiles, rounds, first_call (seconds) and error; a peer that fails is a row with an error,
    one that cannot compute a spec is left out. Writes `<output>/<device>/<spec>.json`, and for several specs
    `attention.json` and `attention.png`; `output=None` writes nothing. `device="cpu"` is a dry run in
    Triton's interpreter, whose times mean nothing. Raises `KgenError` for a spec that is not rendered or an
    unknown peer, `MissingError` without torch, triton or a CUDA device.
    """
    if unknown := [name for name in against if name not in PEERS]:
        names = ", ".join(PEERS)
        raise KgenError(Diagnostic("unknown-peer", f"unknown peer `{unknown[0]}`", hint=f"one of {names}"))
    work = [(problem_of(one), require_emitted(generated, one)) for one in loaded]
    device = pick_device(device)
    shape = shape or Shape()
    reports = []
    for number, (problem, path) in enumerate(work):
        reports.append(_report(_job(problem, path, tuple(against), shape, device), timeout))
        if progress is not None:
            progress(number + 1, len(work), problem.name)
    if output is not None:
        _write(Path(output), reports)
    return [row for report in reports for row in report["rows"]]


def _job(problem: Problem, path: Path, against: tuple[str, ...], shape: Shape, device: str) -> BenchJob:
    from kgen.bench.worker import BenchJob  # imports torch

    size = (shape.batch, shape.heads, shape.length)
    effort = (20, 1.5) if device == "cuda" else (3, 0.0)
    return BenchJob(problem, path.resolve(), ("kgen", *against), *size, device, *effort)


def _report(job: BenchJob, timeout: float) -> dict[str, Any]:
    """Everything that one worker says."""
    name = job.problem.name
    report: dict[str, Any] = {"format": 1, "spec": name, "facts": {}, "workload": {}, "rows": []}
    environment = {"TRITON_INTERPRET": "1" if job.device == "cpu" else None}
    try:
        for message in messages("kgen.bench.worker", job, timeout, environment):
            if "peer" in message:
                report["rows"].append(_row(name, message))
            else:
                report.update(message)
    except WorkerError as error:
        done = {(row["pass"], row["peer"]) for row in report["rows"]}
        passes = ["forward", *(["backward"] if "backward" in job.problem.passes else [])]
        lost = [(pass_, peer) for pass_ in passes for peer in job.peers if (pass_, peer) not in done]
        report["rows"] += [_row(name, {"pass": p, "peer": peer, "error": str(error)}) for p, peer in lost]
    return report


def _row(spec: str, found: dict[str, Any]) -> dict[str, Any]:
    columns = (
        "pass",
        "peer",
        "milliseconds",
        "tflops",
        "ratio",
        "quartiles",
        "rounds",
        "first_call",
        "error",
    )
    return {"spec": spec, **{column: found.get(column) for column in columns}}


def _write(output: Path, reports: Sequence[dict[str, Any]]) -> None:
    devices = [report["facts"].get("device") for report in reports]
    device = next((name for name in devices if name), "unknown")
    folder = output / re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    for report in reports:
        _dump(folder / f"{report['spec']}.json", report)
    if len(reports) > 1:
        _dump(folder / "attention.json", {"format": 1, "reports": list(reports)})
        plot(reports, folder / "attention.png")


def _dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
