"""`kgen bench`: time emitted kernels and their peers, interleaved, one run per spec."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kgen.bench.options import BenchOptions, is_neutral
from kgen.diagnostics import Diagnostic, KgenError
from kgen.family import family
from kgen.verify.emitted import Emitted, require_emitted
from kgen.verify.events import Listener, Progressed, ignore
from kgen.verify.families import problem_of
from kgen.verify.farm.tasks import NODE, Hands, Here, Messages, Row, Task
from kgen.verify.processes import WorkerError, messages

if TYPE_CHECKING:
    from kgen.bench.timing import BenchJob

DEFAULT = BenchOptions()
SEVERAL = ("neutral", "shapes")
"""Kinds of reports whose rows have a shape."""


def bench_specs(
    loaded: Sequence[Any],
    generated: Path,
    options: BenchOptions = DEFAULT,
    hands: Hands | None = None,
    hear: Listener = ignore,
) -> list[dict[str, Any]]:
    """Time the emitted files of some specs against peers.

    Return one row per spec, pass and peer:

    | field | meaning |
    | --- | --- |
    | `milliseconds`, `quartiles`, `rounds` | median, first and third quartile, number of calls |
    | `tflops` or `tbps` | rate of the median |
    | `ratio` | the peer's time divided by kgen's |
    | `first_call` | seconds, compilation included |
    | `distance` | relative distance of the result from kgen's |
    | `error` | the message of a peer that failed, else None |
    | `missing` | True if the package of the peer is not installed |
    | `shape` | the size, if there are several |
    | `device`, `node` | of rows from other machines |

    A peer that cannot compute a spec has no row. A peer whose package is missing has rows with an
    error that says how to install it. Each report has `seconds`: the time until the
    worker had imported everything, created its workload, and measured the first peer.

    Write `<output>/<device>/<spec>.json`, and for several specs of a family `<family>.json` and
    `<family>.png`. Several shapes give `<family>-shapes.json`, neutral shapes give
    `<family>-neutral.json`, and first calls give `<family>-first-call.json`. Reports are written
    again after each worker.

    `hands` run the races, each spec on one device. The default is one process on this machine.
    Several processes prepare in parallel and measure in turn. `hear` receives an event per row.

    Raise `KgenError` for a spec that is not rendered, an unknown peer or a wrong shape. Raise
    `MissingError` without torch, Triton or the device.
    """
    hands = Here() if hands is None else hands
    entries = list(_entries(options.shard.of(loaded, lambda one: one.folder), generated, options))
    options = replace(options, device=hands.device(options.device))
    with tempfile.TemporaryDirectory(prefix="kgen-") as folder:
        turns = Path(folder) / "turns" if hands.beside > 1 and not hands.far else None
        # Local workers share one device, so they can divide the parts of a size. A remote worker
        # may have another device, so one worker measures all parts.
        races = [race for one in entries for race in one.races(options, turns, together=hands.far)]
        reports = _Reports(races, options, hear)
        hands.run(races, reports.heard)
    return [row for report in reports.merged() for row in report["rows"]]


@dataclass(frozen=True)
class _Entry:
    """One spec at one shape."""

    problem: Any
    files: list[Emitted]
    peers: tuple[str, ...]
    text: str
    """The shape as the user wrote it."""
    size: Any

    def races(self, options: BenchOptions, turns: Path | None, *, together: bool) -> Iterator[Task]:
        """Yield one task per part of the size, or a single task if `together`."""
        own = tuple(replace(file, path=file.path.resolve()) for file in self.files)
        folders = tuple(dict.fromkeys(file.path.parent for file in own))
        shown = self.text if options.kind in SEVERAL else None
        parts = tuple(self.size.parts(getattr(self.problem, "widths", ())))
        do = partial(run_race, timeout=options.timeout)
        for number, some in enumerate([parts] if together else [(part,) for part in parts]):
            race = Race(
                self.problem,
                own,
                self.peers,
                some,
                shown,
                options.device,
                options.first_call,
                turns,
            )
            key = (self.files[0].spec, self.text, str(number))
            yield Task(key, do, race, folders, options.device)


def _entries(loaded: Sequence[Any], generated: Path, options: BenchOptions) -> Iterator[_Entry]:
    """Yield each spec at each shape. Raise the `KgenError`s of `bench_specs`."""
    for one in loaded:
        if (bench := family(one.spec.kernel).bench) is None:
            message = f"kernel `{one.spec.kernel}` has no benchmark"
            raise KgenError(Diagnostic("bench-kernel", message, file=str(one.path)))
        problem, own = problem_of(one), bench.shape.get()
        peers = tuple(own.DEFAULT_PEERS if options.against is None else options.against)
        if unknown := [name for name in peers if name not in own.PEERS]:
            hint = f"one of {', '.join(own.PEERS)}"
            raise KgenError(Diagnostic("unknown-peer", f"unknown peer `{unknown[0]}`", hint=hint))
        files = require_emitted(generated, one)
        sizes = _sizes(options, own, problem, str(one.path))
        yield from (_Entry(problem, files, peers, text, size) for text, size in sizes.items())


def _sizes(options: BenchOptions, own: Any, problem: Any, path: str) -> dict[str, Any]:
    """Return the shapes to measure by text. Raise `KgenError` for text that is no shape."""
    sizes: dict[str, Any] = {}
    for text in options.shapes:
        if not is_neutral(text):
            sizes[text] = own.Shape.parse(text) if text else own.Shape()
            continue
        known, (_, _, one) = own.neutral(problem), text.partition(":")
        if not known:
            message = "the spec has no neutral shapes"
            hint = f"these have some: {own.NEUTRAL_SPECS}"
            raise KgenError(Diagnostic("no-neutral-shapes", message, file=path, hint=hint))
        if one and one not in known:
            hint = f"one of {', '.join(known)}"
            message = f"`{one}` is no neutral shape"
            raise KgenError(Diagnostic("bad-shape", message, file=path, hint=hint))
        sizes |= {one: known[one]} if one else known
    return sizes


class _Reports:
    """Reports of races, in the order of the request."""

    def __init__(self, races: Sequence[Task], options: BenchOptions, hear: Listener) -> None:
        self._races, self._options, self._hear = races, options, hear
        self._found: dict[tuple[str, ...], dict[str, Any]] = {}

    def heard(self, task: Task, row: Row) -> None:
        """Report progress for a row. Store a finished report and write all reports so far."""
        if "report" not in row:
            doing = f"{row['spec']} {row['pass']} {row['peer']}"
            self._hear(Progressed(len(self._found), len(self._races), doing))
            return
        self._found[task.key] = row["report"]
        if self._options.output is not None:
            whole = len(self._found) == len(self._races)
            _write(Path(self._options.output), self.merged(), self._options.kind, plot=whole)

    def merged(self) -> list[dict[str, Any]]:
        """One report per spec and shape."""
        own: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for race in self._races:
            if race.key in self._found:
                own.setdefault(race.key[:2], []).append(self._found[race.key])
        return [_merged(found) for found in own.values()]


@dataclass(frozen=True)
class Race:
    """The work of one device: the files of a spec that can run there, and the peers."""

    problem: Any
    files: tuple[Emitted, ...]
    peers: tuple[str, ...]
    sizes: tuple[Any, ...]
    shape: str | None
    """The shape as the user wrote it, if there are several."""
    device: str
    first_call: bool
    turns: Path | None


def run_race(
    race: Race, instead: Messages | None = None, *, timeout: float
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a race, then a `report` with all of them."""
    files = [file for file in race.files if instead or not file.unable(race.device)]
    able = {file: file.rank for file in files if file.rank is not None}
    best_first = sorted(able, key=lambda file: -able[file])
    parts = {part: file.path for file in files if (part := file.part)}
    reports: list[dict[str, Any]] = []
    for size in race.sizes:
        job = _job(race.problem, best_first, race.peers, size, race.device, race.turns)
        job = replace(job, first_call=race.first_call, parts=parts)
        reports.append({"spec": race.files[0].spec})
        for row in _rows(job, timeout, reports[-1], instead or messages):
            if race.shape is not None:
                row["shape"] = race.shape
            yield row
    yield {"report": _merged(reports)}


def _merged(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the reports of the parts of one spec."""
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
    return BenchJob(
        problem, paths, names, shape, device, *effort, forward_only=forward_only, turns=turns
    )


def _rows(
    job: BenchJob, timeout: float, report: dict[str, Any], messages: Messages
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one worker, and fill `report` with all its messages.

    The report has the name of the spec, with its variant if it has several.
    """
    name = report["spec"]
    report |= {"format": 1, "kernel": job.problem.kernel}
    # The default file depends on the device, so the report names the file behind each peer name.
    report["files"] = dict(zip(job.peers, job.files, strict=False))
    rows: list[dict[str, Any]] = []
    report |= {"facts": {}, "workload": {}, "rows": rows, "seconds": {}}
    began = time.perf_counter()
    environment = {"TRITON_INTERPRET": "1" if job.device == "cpu" else None}
    if job.turns is not None:
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # the workers already use all cores
    try:
        for message in messages("kgen.bench.worker", job, timeout, environment):
            stage = "measured" if "peer" in message else next(iter(message))
            report["seconds"].setdefault(stage, round(time.perf_counter() - began, 1))
            if "peer" in message:
                # Rows of another machine name their device and node.
                where = {"device": report["facts"].get("device"), "node": NODE[0]} if NODE else {}
                rows.append(_row(name, message) | where)
                yield rows[-1]
            else:
                report.update(message)
    except WorkerError as error:
        done = {(row["pass"], row["peer"]) for row in rows}
        passes = ["forward", *(["backward"] if "backward" in job.problem.passes else [])]
        for lost in [(p, peer) for p in passes for peer in job.peers if (p, peer) not in done]:
            rows.append(_row(name, {"pass": lost[0], "peer": lost[1], "error": str(error)}))
            yield rows[-1]


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
    return {"spec": spec, **dict.fromkeys(known), "missing": False, **found}


def _write(output: Path, reports: Sequence[dict[str, Any]], kind: str, plot: bool) -> None:
    """Write the reports of each device to the device's folder."""
    devices = [report["facts"].get("device") for report in reports]
    # A worker that died early did not report its device. Assume the device of the others.
    usual = next((name for name in devices if name), "unknown")
    for device in dict.fromkeys(name or usual for name in devices):
        own = [one for one, name in zip(reports, devices, strict=True) if (name or usual) == device]
        _write_device(output, device, own, kind, plot)


def _write_device(
    output: Path, device: str, reports: Sequence[dict[str, Any]], kind: str, plot: bool
) -> None:
    folder = output / re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    for report in [] if kind else reports:
        _dump(folder / f"{report['spec'].replace('/', '-')}.json", report)
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
