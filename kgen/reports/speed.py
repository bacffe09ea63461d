"""Charts of the reports that `kgen bench` wrote. Nothing is measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kgen.files import read_json
from kgen.pages.model import (
    Bars,
    Block,
    Code,
    Group,
    Line,
    Lines,
    Prose,
    Section,
    Table,
    quoting,
    words,
)

UNITS = {"tflops": "TFLOP/s", "tbps": "TB/s", "milliseconds": "ms, lower is better"}
"""Units of a row by field. The first field that a row has is drawn."""
OWN = "kgen"

Row = Mapping[str, Any]
Report = Mapping[str, Any]


def speed(benchmarks: Path) -> Iterator[Section]:
    """Yield a section per report file.

    A report that is also in a family's file is drawn only there.
    """
    files = {path: _reports(path) for path in sorted(benchmarks.glob("*/*.json"))}
    if not files:
        yield Section("Speed", (Prose(words("There are no benchmark reports.")),))
    families = [report for found in files.values() if found and len(found) > 1 for report in found]
    other = [path for path, found in files.items() if found is None]
    for path, found in files.items():
        own = [r for r in found or () if len(found or ()) > 1 or r not in families]
        if own:
            name = path.relative_to(benchmarks).with_suffix("").as_posix()
            yield Section(f"Speed: {name}", tuple(_drawn(own)))
    if other:
        why = "These files are not reports of `kgen bench`:"
        lines = tuple(Line(path.relative_to(benchmarks).as_posix()) for path in other)
        yield Section("Not drawn", (Lines(lines, quoting(why)),))


def _reports(path: Path) -> list[Report] | None:
    """Return the reports of a file, or None if it holds something else. Raise `KgenError` if it is
    not JSON."""
    try:
        found = read_json(path, "bad-benchmark", f"remove {path}, or measure again")
    except OSError:
        return None
    reports = found.get("reports", [found]) if isinstance(found, dict) else None
    return reports if isinstance(reports, list) and all(map(_is_report, reports)) else None


def _is_report(report: object) -> bool:
    return (
        isinstance(report, dict)
        and isinstance(report.get("spec"), str)
        and isinstance(report.get("facts"), dict)
        and isinstance(report.get("rows"), list)
        and all(map(_is_row, report["rows"]))
    )


def _is_row(row: object) -> bool:
    return (
        isinstance(row, dict)
        and all(
            isinstance(row.get(name), str) and row[name].split()
            for name in ("spec", "pass", "peer")
        )
        and all(isinstance(row.get(name), int | float | None) for name in (*UNITS, "ratio"))
    )


def _drawn(reports: Sequence[Report]) -> Iterator[Block]:
    yield Prose(
        words("; ".join(dict.fromkeys(_measured_on(report["facts"]) for report in reports)))
    )
    rows: list[Row] = [row for report in reports for row in report["rows"]]
    if ratios := _ratios(rows):
        yield ratios
    palette = tuple(dict.fromkeys(row["peer"] for row in rows))
    for title, unit, own in _charts(rows):
        groups: dict[str, dict[str, float]] = {}
        for name, row, value in own:
            groups.setdefault(name, {})[row["peer"]] = value
        bars = tuple(Group(name, values) for name, values in groups.items())
        yield Bars(title, unit, bars, palette=palette)
    failed = tuple(
        (
            words(Code(row["spec"])),
            words(row["pass"]),
            words(row["peer"]),
            words(str(row["error"])[:200]),
        )
        for row in rows
        if row.get("error")
    )
    if failed:
        yield Table(("spec", "pass", "peer", "error"), failed)


def _measured_on(facts: Mapping[str, Any]) -> str:
    versions = facts.get("versions")
    named = [f"{name} {v}" for name, v in versions.items()] if isinstance(versions, dict) else []
    return ", ".join([str(facts.get("device", "unknown device")), *named])


def _ratios(rows: Sequence[Row]) -> Table | None:
    """Return a table of the peers' times divided by kgen's, by pass."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if (
            row["ratio"]
            and row["ratio"] > 0
            and not row["peer"].startswith(OWN)
            and row["peer"] != "copy"
        ):
            found.setdefault(row["pass"].split()[0], {}).setdefault(row["peer"], []).append(
                row["ratio"]
            )
    peers = tuple(dict.fromkeys(peer for by_peer in found.values() for peer in by_peer))
    cells = tuple(
        (words(pass_), *(words(_spread(by_peer.get(peer, []))) for peer in peers))
        for pass_, by_peer in found.items()
    )
    return (
        Table(("time divided by kgen's: geometric mean (lowest to highest)", *peers), cells)
        if cells
        else None
    )


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"{mean:.2f}" + (f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else "")


def _charts(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[tuple[str, Row, float]]]]:
    """Yield title, unit and bars per chart: one per pass, or one per spec if specs were measured at
    several sizes."""
    found: dict[tuple[str, str], list[tuple[Row, float]]] = {}
    for row in rows:
        unit = next((unit for unit in UNITS if row.get(unit) is not None), None)
        if unit is not None:
            found.setdefault((row["pass"].split()[0], unit), []).append((row, float(row[unit])))
    for (pass_, unit), own in found.items():
        details = [(row, _detail(row), value) for row, value in own]
        several = len({detail for _, detail, _ in details}) > 1
        specs = dict.fromkeys(row["spec"] for row, _ in own) if several else {None: None}
        for spec in specs:
            of_spec = [one for one in details if spec is None or one[0]["spec"] == spec]
            named = [
                (row["spec"] if spec is None else detail, row, value)
                for row, detail, value in of_spec
            ]
            yield pass_ if spec is None else f"{spec}, {pass_}", UNITS[unit], named


def _detail(row: Row) -> str:
    """Return the shape, width or length that distinguishes rows of the same spec, pass and peer."""
    rest = row["pass"].partition(" ")[2]
    sizes = f"{row['rows']} x {row['width']}" if "width" in row and "rows" in row else ""
    graph = "in a graph" if row.get("graph") else ""
    return ", ".join(filter(None, [rest, str(row.get("shape", "")), sizes, graph]))
