"""What the plots of all families share: matplotlib if it is there, bars side by side, files that can be compared."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def pyplot() -> Any:
    """`matplotlib.pyplot`, drawing to files; None, with a note, where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        print("kgen bench: no plot, matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as found

    return found


def bars(
    axis: Any, groups: Sequence[str], series: Mapping[str, Mapping[str, float]], form: str, **labels: Any
) -> None:
    """A bar for each series in each group, those of a group side by side, with its height as `form` shows it.

    `series` are heights by group, by the series' name. A group may lack a series. `labels` are options of matplotlib.
    """
    width = 0.8 / max(1, len(series))
    for number, (name, heights) in enumerate(series.items()):
        there = [(i, heights[group]) for i, group in enumerate(groups) if group in heights]
        places = [i + (number - (len(series) - 1) / 2) * width for i, _ in there]
        drawn = axis.bar(places, [height for _, height in there], width, label=name, color=f"C{number}")
        axis.bar_label(drawn, fmt=form, fontsize=7, **labels)
    axis.spines[["top", "right"]].set_visible(False)


def on_device(title: str, reports: Sequence[Mapping[str, Any]]) -> str:
    """A title with the device that the reports are from."""
    device = next((r["facts"]["device"] for r in reports if r["facts"].get("device")), "")
    return f"{title} on {device}" if device else title


def save(figure: Any, path: Path) -> None:
    """Write a figure; the same numbers give the same file, whatever version of matplotlib drew it."""
    figure.tight_layout()
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot().close(figure)
