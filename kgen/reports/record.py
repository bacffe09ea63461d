"""What was verified and what was measured, on one page: the ledger and the reports of benchmarks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kgen.pages.model import Bars, Block, Code, Group, Page, Prose, Section, Table, quoting, words
from kgen.reports.speed import speed
from kgen.spec.load import Loaded
from kgen.verify.ledger import INTERPRETER, STATES, status


def record(loaded: Sequence[Loaded], generated: Path, benchmarks: Path) -> Page:
    """The page."""
    rows = status(loaded, generated)
    kernels = {one.spec.name: one.spec.kernel for one in loaded}
    counted = Counter(row["state"] for row in rows)
    said = ", ".join(f"{counted[state]} {state}" for state in STATES if counted[state])
    return Page(
        "Kernels on record",
        f"{len(kernels)} specs, {len(rows)} files: {said}" if rows else "no specs",
        (
            Section("States by file", tuple(_states(rows))),
            Section("Errors", tuple(_errors(rows, kernels))),
            Section("Where files ran", tuple(_places(rows))),
            Section("Files", (_files(rows),)),
            *speed(benchmarks),
        ),
    )


def _states(rows: Sequence[dict[str, Any]]) -> Iterator[Block]:
    names = sorted({Path(row["file"]).name for row in rows})
    counts = {name: Counter(row["state"] for row in rows if Path(row["file"]).name == name) for name in names}
    groups = (
        Group(name, {state: float(counts[name][state]) for state in STATES if counts[name][state]})
        for name in names
    )
    if names:
        yield Bars("Files by state", "files", tuple(groups), stacked=True, palette=STATES)
    yield Prose(
        quoting(
            "`verified` is the present text, run right on a GPU against float64; `interpreted`, in Triton's "
            "interpreter alone; `compiled`, not run; `stale`, none of these; `missing`, not rendered."
        )
    )


def _errors(rows: Sequence[dict[str, Any]], kernels: dict[str, str]) -> Iterator[Block]:
    yield Prose(
        words(
            "The worst error of any output of any case, relative to float64. Bars are logarithmic. An error of the "
            "size of a rounding of its dtype is none: each is held against that of eager PyTorch in the same dtypes."
        )
    )
    for kernel in dict.fromkeys(kernels.values()):
        own = [row for row in rows if kernels[row["spec"]] == kernel and row["error"]]
        palette = tuple(dict.fromkeys(row["device"] for row in own))
        groups = tuple(Group(_named(row), {row["device"]: row["error"]}) for row in own)
        if groups:
            title, unit = f"Kernels of {kernel}", "relative error"
            yield Bars(title, unit, groups, logarithmic=True, palette=palette)


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
        yield Prose(words("Nothing on record ran anywhere."))


def _files(rows: Sequence[dict[str, Any]]) -> Table:
    cells = []
    for row in rows:
        proof = row["proof"]
        proved = f"{proof['proved']} of {proof['proved'] + proof['unknown']}" if proof else ""
        error = "" if row["error"] is None else f"{row['error']:.3g}"
        file = Code(f"{row['spec']}/{Path(row['file']).name}")
        cells.append(
            (words(file), words(row["state"]), words(row["device"] or ""), words(error), words(proved))
        )
    return Table(("file", "state", "on", "worst error", "obligations proved"), tuple(cells))
