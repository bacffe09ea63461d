"""Bars of bytes moved per second, by workload and peer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def plot(reports: Sequence[dict[str, Any]], path: Path) -> bool:
    """Draw TB/s of every peer for each spec and pass. False, with a note, where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        print("kgen bench: no plot, matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = [
        (report["spec"], rows)
        for report in reports
        if (rows := [row for row in report["rows"] if row.get("tbps") is not None])
    ]
    if not measured:
        return False
    figure, axes = pyplot.subplots(len(measured), 1, figsize=(12.0, 2.6 * len(measured)), squeeze=False)
    for axis, (spec, rows) in zip(axes[:, 0], measured, strict=True):
        passes = list(dict.fromkeys(row["pass"] for row in rows))
        peers = list(dict.fromkeys(row["peer"] for row in rows))
        width = 0.8 / len(peers)
        for number, peer in enumerate(peers):
            heights = {row["pass"]: row["tbps"] for row in rows if row["peer"] == peer}
            places = [i + (number - (len(peers) - 1) / 2) * width for i in range(len(passes))]
            bars = axis.bar(places, [heights.get(pass_, 0.0) for pass_ in passes], width, label=peer)
            axis.bar_label(bars, fmt=lambda height: f"{height:.2f}" if height else "", fontsize=7)
        axis.set_xticks(range(len(passes)), passes, fontsize=7)
        axis.set_ylabel("TB/s")
        axis.set_title(spec, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, ncols=len(peers), fontsize=7, loc="upper right")
    device = next((r["facts"]["device"] for r in reports if r["facts"].get("device")), "")
    figure.suptitle(f"Chunk output on {device}" if device else "Chunk output")
    figure.tight_layout()
    # Without the version of matplotlib the same numbers give the same file.
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)
    return True
