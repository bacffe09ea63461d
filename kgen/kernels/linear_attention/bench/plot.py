"""Bar charts of milliseconds for each spec, by pass and peer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kgen.bench import plotting


def plot(reports: Sequence[dict[str, Any]], path: Path) -> bool:
    """Draw the milliseconds of every peer. Return False without matplotlib or data."""
    pyplot = plotting.pyplot()
    measured = [r for r in reports if any(row["milliseconds"] is not None for row in r["rows"])]
    if pyplot is None or not measured:
        return False
    size = (10.0, 0.4 + 2.4 * len(measured))
    figure, axes = pyplot.subplots(len(measured), 1, figsize=size, squeeze=False)
    for (axis,), report in zip(axes, measured, strict=True):
        rows = [row for row in report["rows"] if row["milliseconds"] is not None]
        groups = list(dict.fromkeys(row["pass"] for row in rows))
        series: dict[str, dict[str, float]] = {row["peer"]: {} for row in rows}
        for row in rows:
            series[row["peer"]][row["pass"]] = row["milliseconds"]
        plotting.bars(axis, groups, series, "%.3g")
        axis.set_xticks(range(len(groups)), groups, fontsize=7)
        axis.set_title(report["spec"], fontsize=9)
        axis.set_ylabel("ms")
        axis.set_yscale("log")
        axis.legend(frameon=False, ncols=4, fontsize=7)
    figure.suptitle(plotting.on_device("Linear attention", reports), x=0.75)
    plotting.save(figure, path)
    return True
