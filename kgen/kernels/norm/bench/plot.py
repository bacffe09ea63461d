"""Line charts of throughput over width, for each spec and pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kgen.bench import plotting
from kgen.kernels.norm.bench.shape import ODD_WIDTHS


def plot(reports: Sequence[dict[str, Any]], path: Path) -> bool:
    """Draw TB/s of every peer over the width, odd widths as rings. Return False without matplotlib
    or data."""
    pyplot = plotting.pyplot()
    if pyplot is None:
        return False
    rows = [
        row
        for report in reports
        for row in report["rows"]
        if row["tbps"] is not None and not row.get("graph")
    ]
    panels = list(dict.fromkeys((row["spec"], row["pass"]) for row in rows))
    if not panels:
        return False
    passes = [name for name in ("forward", "backward") if any(p == name for _, p in panels)]
    specs = list(dict.fromkeys(spec for spec, _ in panels))
    size = (4.2 * len(specs), 3.2 * len(passes))
    figure, axes = pyplot.subplots(
        len(passes), len(specs), figsize=size, sharey=True, squeeze=False
    )
    for (i, pass_), (j, spec) in ((a, b) for a in enumerate(passes) for b in enumerate(specs)):
        axis = axes[i, j]
        own = [row for row in rows if (row["spec"], row["pass"]) == (spec, pass_)]
        for peer in dict.fromkeys(row["peer"] for row in own):
            points = sorted((row["width"], row["tbps"]) for row in own if row["peer"] == peer)
            style = (
                {"linestyle": "--", "color": "grey"}
                if peer == "copy"
                else {"marker": "o", "markersize": 3}
            )
            line = axis.plot(
                *_columns(p for p in points if p[0] not in ODD_WIDTHS), label=peer, **style
            )[0]
            # A line between powers of two would suggest values that were not measured.
            odd = _columns(p for p in points if p[0] in ODD_WIDTHS)
            axis.plot(
                *odd,
                linestyle="",
                marker="o",
                markersize=4,
                fillstyle="none",
                color=line.get_color(),
            )
        axis.set_xscale("log", base=2)
        axis.set_title(f"{spec}, {pass_}", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("TB/s")
    for axis in axes[-1, :]:
        axis.set_xlabel("width")
    axes[0, 0].legend(frameon=False, fontsize=7, ncols=2, loc="lower center")
    plotting.save(figure, path)
    return True


def _columns(points: Iterable[tuple[int, float]]) -> tuple[list[int], list[float]]:
    points = list(points)
    return [x for x, _ in points], [y for _, y in points]
