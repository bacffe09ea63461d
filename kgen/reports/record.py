"""The page of `kgen report`: the ledger and the benchmark reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kgen.pages.model import Bars, Block, Code, Group, Page, Prose, Section, Table, quoting, words
from kgen.reports.speed import speed
from kgen.spec.load import Loaded
from kgen.verify.ledger import INTERPRETER, STATES, Ledger, file_hash, read, status


def record(loaded: Sequence[Loaded], generated: Path, benchmarks: Path) -> Page:
    """Return the page for some specs, a folder of emitted files and a folder of benchmarks."""
    rows, files = status(loaded, generated), read(generated)
    kernels = {one.folder: one.spec.kernel for one in loaded}
    counted = Counter(row["state"] for row in rows)
    said = ", ".join(f"{counted[state]} {state}" for state in STATES if counted[state])
    return Page(
        "Kernels on record",
        f"{len(kernels)} specs, {len(rows)} files: {said}" if rows else "no specs",
        (
            Section("States by file", tuple(_states(rows))),
            Section("Errors", tuple(_errors(rows, kernels, files))),
            Section("Where files ran", tuple(_places(rows))),
            Section("Files", (_files(rows, files),)),
            *speed(benchmarks),
        ),
    )


def _states(rows: Sequence[dict[str, Any]]) -> Iterator[Block]:
    names = sorted({Path(row["file"]).name for row in rows})
    counts = {
        name: Counter(row["state"] for row in rows if Path(row["file"]).name == name)
        for name in names
    }
    groups = (
        Group(name, {state: float(counts[name][state]) for state in STATES if counts[name][state]})
        for name in names
    )
    if names:
        yield Bars("Files by state", "files", tuple(groups), stacked=True, palette=STATES)
    yield Prose(
        quoting(
            "`verified`: this text passed on a GPU, compared with float64. `interpreted`: it "
            "passed only in Triton's "
            "interpreter. `compiled`: it compiled and did not run. `stale`: only an earlier text "
            "has a result. "
            "`unrecorded`: no result. `missing`: not rendered."
        )
    )


def _errors(
    rows: Sequence[dict[str, Any]], kernels: dict[str, str], files: Ledger
) -> Iterator[Block]:
    """Yield charts of the errors of each file, on the first device where it ran."""
    yield Prose(
        words(
            "Errors of the worst case, compared with float64. The criterion is the error divided "
            "by the error of "
            "eager PyTorch in the same dtypes, or by a rounding of the result if that is larger. A "
            "gradient that "
            "nearly cancels has a large relative error in any implementation. Bars of errors are "
            "logarithmic."
        )
    )
    for kernel in dict.fromkeys(kernels.values()):
        own = [
            (row, found)
            for row in rows
            if kernels[row["spec"]] == kernel and (found := _worst(row, files))
        ]
        palette = tuple(dict.fromkeys(row["device"] for row, _ in own))
        ratios = [(row, max(ratio for _, ratio in found.values())) for row, found in own]
        errors = [(row, found[OUTPUT][0]) for row, found in own if OUTPUT in found]
        charts = {
            (f"{kernel}: error divided by eager's, worst of all outputs", "times"): ratios,
            (f"{kernel}: error of the output", "relative"): errors,
        }
        for (title, unit), values in charts.items():
            groups = tuple(Group(_named(row), {row["device"]: value}) for row, value in values)
            if groups:
                yield Bars(title, unit, groups, logarithmic=values is errors, palette=palette)


OUTPUT = "out"
"""Name of the result in the ledger if a file has several outputs."""


def _worst(row: dict[str, Any], files: Ledger) -> dict[str, tuple[float, float]]:
    """Return the error and ratio of each output on the row's device; empty if the file has not
    run.
    """
    if row["device"] is None:
        return {}
    records = files.get(file_hash(Path(row["file"])), {"records": {}})["records"]
    found: dict[str, tuple[float, float]] = {}
    for place in row["verified"]:
        if records[place]["device"] == row["device"]:
            for name, entry in records[place]["worst"].items():
                error, ratio = found.get(name, (0.0, 0.0))
                found[name] = (
                    max(error, entry["error"]),
                    max(ratio, float(entry.get("ratio") or 0.0)),
                )
    return found


def _named(row: dict[str, Any]) -> str:
    file = Path(row["file"])
    return str(row["spec"]) if file.name == "triton.py" else f"{row['spec']}, {file.stem}"


def _places(rows: Sequence[dict[str, Any]]) -> Iterator[Block]:
    ran = Counter(place for row in rows for place in row["verified"])
    earlier = Counter(place for row in rows for place in row["earlier"])
    places = sorted({*ran, *earlier}, key=lambda place: (place.startswith(INTERPRETER), place))
    cells = tuple((words(p), words(str(ran[p])), words(str(earlier[p] or ""))) for p in places)
    if cells:
        yield Table(("device and toolchain", "files", "earlier texts of files"), cells)
    else:
        yield Prose(words("No recorded file ran."))


def _files(rows: Sequence[dict[str, Any]], files: Ledger) -> Table:
    cells = []
    for row in rows:
        proof = row["proof"]
        proved = f"{proof['proved']} of {proof['proved'] + proof['unknown']}" if proof else ""
        worst = max(_worst(row, files).items(), key=lambda item: item[1][1], default=None)
        said = f"{worst[1][1]:.3g} ({worst[0]}, error {worst[1][0]:.2g})" if worst else ""
        file = Code(f"{row['spec']}/{Path(row['file']).name}")
        cells.append(
            (
                words(file),
                words(row["state"]),
                words(row["device"] or ""),
                words(said),
                words(proved),
            )
        )
    return Table(
        ("file", "state", "on", "worst error divided by eager's", "obligations proved"),
        tuple(cells),
    )
