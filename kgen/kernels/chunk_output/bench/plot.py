"""Bar charts of bytes per second for each spec and pass, by workload and peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kgen.bench import plotting


def plot(reports: Sequence[dict[str, Any]], path: Path) -> bool:
    """Draw TB/s of every peer, with the copy as a line. Return False without matplotlib or data."""
    pyplot = plotting.pyplot()
    measured = [
        report for report in reports if any(row["tbps"] is not None for row in report["rows"])
    ]
    if pyplot is None or not measured:
        return False
    size = (12.0, 0.4 + 2.6 * len(measured))
    figure, axes = pyplot.subplots(len(measured), 2, figsize=size, sharey=True, squeeze=False)
    for line, report in zip(axes, measured, strict=True):
        for axis, pass_ in zip(line, ("forward", "backward"), strict=True):
            _panel(axis, report, pass_)
        line[0].set_ylabel("TB/s")
    for axis in axes[-1]:
        axis.set_xlabel("tokens, and sequences where there are several", fontsize=8)
    axes[0, 0].legend(
        frameon=False, ncols=2, fontsize=7, loc="lower left", bbox_to_anchor=(0, 1.08)
    )
    figure.suptitle(plotting.on_device("Chunk output", reports), x=0.75)
    plotting.save(figure, path)
    return True


def _panel(axis: Any, report: Mapping[str, Any], pass_: str) -> None:
    rows = [
        row for row in report["rows"] if row["tbps"] is not None and row["pass"].split()[0] == pass_
    ]
    # The name of a pass contains its tokens, and the number of sequences if there are several.
    groups = list(dict.fromkeys(row["pass"].removeprefix(f"{pass_} ") for row in rows))
    series: dict[str, dict[str, float]] = {
        row["peer"]: {} for row in report["rows"] if row["peer"] != "copy"
    }
    copies: dict[str, float] = {}
    for row in rows:
        heights = copies if row["peer"] == "copy" else series[row["peer"]]
        heights[row["pass"].removeprefix(f"{pass_} ")] = row["tbps"]
    files = report.get("files", {})
    named = {
        f"kgen: {files[name]}" if name in files else name: heights
        for name, heights in series.items()
    }
    plotting.bars(axis, groups, named, "%.2f", label_type="center", color="white")
    for at, group in enumerate(groups):
        axis.hlines(copies[group], at - 0.45, at + 0.45, "grey", "--", label="" if at else "copy")
    axis.set_xticks(
        range(len(groups)), [group.replace(" ", "\n", 1) for group in groups], fontsize=7
    )
    axis.set_title(f"{report['spec']}, {pass_}", fontsize=9)
