"""`kgen bench`: emitted kernels against their peers, in one interleaved run for each spec."""

from __future__ import annotations

import json
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kgen.diagnostics import Diagnostic, KgenError
from kgen.family import family
from kgen.verify.emitted import Emitted, require_emitted
from kgen.verify.families import problem_of
from kgen.verify.processes import WorkerError, messages, threads
from kgen.verify.toolchain import Progress, pick_device

if TYPE_CHECKING:
    from kgen.bench.timing import BenchJob


def bench_specs(
    loaded: Sequence[Any],
    generated: Path,
    against: Sequence[str] | None = None,
    shape: str | None = None,
    output: Path | None = Path("benchmarks"),
    progress: Progress | None = None,
    device: str = "cuda",
    timeout: float = 900.0,
    jobs: int = 1,
    first_call: bool = False,
) -> list[dict[str, Any]]:
    """Time the emitted files of some specs against peers, by default those of the family.

    Returns rows of spec, pass, peer, milliseconds, tflops or tbps, ratio (the peer's time over kgen's: above
    one kgen is faster), quartiles, rounds, first_call (seconds), distance (of the result from kgen's) and error;
    a peer that fails is a row with an error, one that cannot compute a spec is left out. `shape` is text that
    the family reads, as `2x16x8192`; of several with commas each is measured, and rows have it too. Writes
    `<output>/<device>/<spec>.json`, and for several specs of a family `<family>.json` and `<family>.png`, or
    `<family>-shapes.json` alone for several shapes, anew whenever a worker is done, with the `seconds` after which it
    had imported everything, drawn its workload and measured the first peer; `output=None` writes nothing.
    `jobs` workers prepare side by side, and measure one after the other. `first_call` times the first call in a
    fresh process instead, where the family can, and writes `<family>-first-call.json`. `device="cpu"` is a dry
    run in Triton's interpreter, whose times mean nothing. `progress` hears of each row. Raises `KgenError` for a
    spec that is not rendered, an unknown peer or a bad shape, `MissingError` without torch, triton or the device.
    """
    work = []
    shapes = [text.strip() for text in shape.split(",")] if shape else [""]
    for one in loaded:
        if (bench := family(one.spec.kernel).bench) is None:
            message = f"there is nothing to race kernel `{one.spec.kernel}` against yet"
            raise KgenError(Diagnostic("bench-kernel", message, file=str(one.path)))
        problem, own = problem_of(one), bench.shape.get()
        peers = tuple(own.DEFAULT_PEERS if against is None else against)
        if unknown := [name for name in peers if name not in own.PEERS]:
            hint = f"one of {', '.join(own.PEERS)}"
            raise KgenError(Diagnostic("unknown-peer", f"unknown peer `{unknown[0]}`", hint=hint))
        files = require_emitted(generated, one)
        sizes = {text: own.Shape.parse(text) if text else own.Shape() for text in shapes}
        work += [(problem, files, peers, text, size) for text, size in sizes.items()]
    device = pick_device(device)
    tasks = [
        (place, text, part)
        for place, (problem, _, _, text, size) in enumerate(work)
        for part in size.parts(getattr(problem, "widths", ()))
    ]
    found: dict[int, list[tuple[int, dict[str, Any]]]] = {place: [] for place in range(len(work))}
    done, lock = 0, threading.Lock()

    def reports() -> Iterator[dict[str, Any]]:
        return (_merged([one for _, one in sorted(own, key=lambda o: o[0])]) for own in found.values() if own)

    def run(number: int) -> None:
        nonlocal done
        place, text, size = tasks[number]
        problem, files, peers = work[place][:3]
        able = {file: file.rank for file in files if file.rank is not None and not file.unable(device)}
        best_first = sorted(able, key=lambda file: -able[file])
        parts = {
            part: file.path.resolve() for file in files if (part := file.part) and not file.unable(device)
        }
        turns = Path(folder) / "turns" if jobs > 1 else None
        job = _job(problem, best_first, peers, size, device, turns)
        job = replace(job, first_call=first_call, parts=parts)

        def tell(row: dict[str, Any]) -> None:
            with lock:
                if progress is not None:
                    progress(done, len(tasks), f"{row['spec']} {row['pass']} {row['peer']}")

        report = _report(job, timeout, tell)
        if len(shapes) > 1:
            for row in report["rows"]:
                row["shape"] = text
        with lock:
            found[place].append((number, report))
            done += 1
            if output is not None:
                kind = "shapes" if len(shapes) > 1 else "first-call" if first_call else ""
                _write(Path(output), list(reports()), kind, plot=done == len(tasks))

    with tempfile.TemporaryDirectory(prefix="kgen-") as folder, threads(jobs) as pool:
        list(pool.map(run, range(len(tasks))))
    return [row for report in reports() for row in report["rows"]]


def _merged(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The reports of the parts of one spec as one."""
    merged = dict(reports[0], rows=[row for report in reports for row in report["rows"]])
    if len(reports) > 1:
        sizes = [size for report in reports for size in report["workload"].get("sizes", [])]
        merged["workload"] = {**reports[0]["workload"], "sizes": sizes}
    return merged


def _job(
    problem: Any,
    files: Sequence[Emitted],
    against: tuple[str, ...],
    shape: Any,
    device: str,
    turns: Path | None,
) -> BenchJob:
    from kgen.bench.timing import BenchJob  # imports torch

    paths = {file.stem: file.path.resolve() for file in files}
    own = {file: f"kgen-{file.stem}" if number else "kgen" for number, file in enumerate(files)}
    effort = (20, 1.5 if turns is None else 0.5) if device == "cuda" else (3, 0.0)
    forward_only = frozenset(name for file, name in own.items() if file.forward_only)
    names = (*own.values(), *against)
    return BenchJob(problem, paths, names, shape, device, *effort, forward_only=forward_only, turns=turns)


def _report(job: BenchJob, timeout: float, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Everything that one worker says; `tell` hears of each row."""
    name = job.problem.name
    report: dict[str, Any] = {"format": 1, "spec": name, "kernel": job.problem.kernel}
    # Which file is called by which name is said, for that of the default depends on the device.
    report["files"] = dict(zip(job.peers, job.files, strict=False))
    report |= {"facts": {}, "workload": {}, "rows": [], "seconds": {}}
    began = time.perf_counter()
    environment = {"TRITON_INTERPRET": "1" if job.device == "cpu" else None}
    if job.turns is not None:
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # there are as many workers as the cores take
    try:
        for message in messages("kgen.bench.worker", job, timeout, environment):
            stage = "measured" if "peer" in message else next(iter(message))
            report["seconds"].setdefault(stage, round(time.perf_counter() - began, 1))
            if "peer" in message:
                report["rows"].append(_row(name, message))
                tell(report["rows"][-1])
            else:
                report.update(message)
    except WorkerError as error:
        done = {(row["pass"], row["peer"]) for row in report["rows"]}
        passes = ["forward", *(["backward"] if "backward" in job.problem.passes else [])]
        lost = [(pass_, peer) for pass_ in passes for peer in job.peers if (pass_, peer) not in done]
        report["rows"] += [_row(name, {"pass": p, "peer": peer, "error": str(error)}) for p, peer in lost]
    return report


def _row(spec: str, found: dict[str, Any]) -> dict[str, Any]:
    known = (
        "milliseconds",
        "tflops",
        "tbps",
        "ratio",
        "quartiles",
        "rounds",
        "first_call",
        "distance",
        "error",
    )
    return {"spec": spec, **dict.fromkeys(known), **found}


def _write(output: Path, reports: Sequence[dict[str, Any]], kind: str, plot: bool) -> None:
    """A file for each spec, and one with a plot for a family; of another `kind` one for the family."""
    devices = [report["facts"].get("device") for report in reports]
    device = next((name for name in devices if name), "unknown")
    folder = output / re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    for report in [] if kind else reports:
        _dump(folder / f"{report['spec']}.json", report)
    for kernel in dict.fromkeys(report["kernel"] for report in reports):
        own = [report for report in reports if report["kernel"] == kernel]
        if kind:
            _dump(folder / f"{kernel}-{kind}.json", {"format": 1, "reports": own})
        elif len(own) > 1:
            _dump(folder / f"{kernel}.json", {"format": 1, "reports": own})
            if plot and (bench := family(kernel).bench):
                bench.plot(own, folder / f"{kernel}.png")


def _dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
