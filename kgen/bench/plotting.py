"""Helpers for plots of benchmarks. matplotlib is optional."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def pyplot() -> Any:
    """Return `matplotlib.pyplot` with a file backend. Without matplotlib, print a note and return
    None."""
    try:
        import matplotlib
    except ImportError:
        print(
            "kgen bench: no plot, because matplotlib is not installed (pip install matplotlib)",
            file=sys.stderr,
        )
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as found

    return found


def bars(
    axis: Any,
    groups: Sequence[str],
    series: Mapping[str, Mapping[str, float]],
    form: str,
    best: Mapping[str, str] | None = None,
    **labels: Any,
) -> None:
    """Draw grouped bars, one per series, labelled with their heights.

    `series` maps the name of a series to its heights by group. A series may lack a group. `best`
    maps a group to the series whose label is bold. `form` formats the labels, and `labels` are
    further options of `bar_label`.
    """
    width = 0.8 / max(1, len(series))
    for number, (name, heights) in enumerate(series.items()):
        there = [(i, heights[group]) for i, group in enumerate(groups) if group in heights]
        places = [i + (number - (len(series) - 1) / 2) * width for i, _ in there]
        drawn = axis.bar(
            places, [height for _, height in there], width, label=name, color=f"C{number}"
        )
        texts = axis.bar_label(drawn, fmt=form, fontsize=7, **labels)
        for (i, _), text in zip(there, texts, strict=True):
            if best and best.get(groups[i]) == name:
                text.set_fontweight("bold")
    axis.spines[["top", "right"]].set_visible(False)


def on_device(title: str, reports: Sequence[Mapping[str, Any]]) -> str:
    """Return a title with the device of the reports, if one is known."""
    device = next((r["facts"]["device"] for r in reports if r["facts"].get("device")), "")
    return f"{title} on {device}" if device else title


def save(figure: Any, path: Path) -> None:
    """Write and close a figure. Equal figures give equal bytes with every version of matplotlib."""
    figure.tight_layout()
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot().close(figure)
