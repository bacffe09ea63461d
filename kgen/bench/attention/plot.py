"""Bars of throughput, by spec and peer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def plot(reports: Sequence[dict[str, Any]], path: Path) -> bool:
    """Draw TFLOP/s of every peer, forward above backward. False, with a note, where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        print("kgen bench: no plot, matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for report in reports for row in report["rows"] if row["tflops"] is not None]
    passes = [name for name in ("forward", "backward") if any(row["pass"] == name for row in rows)]
    if not passes:
        return False
    specs = list(dict.fromkeys(row["spec"] for row in rows))
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    width = 0.8 / len(peers)
    size = (max(6.0, 1.1 * len(specs) * max(1.0, 0.35 * len(peers))), 3.2 * len(passes))
    figure, axes = pyplot.subplots(len(passes), 1, figsize=size, sharex=True, squeeze=False)
    for axis, pass_ in zip(axes[:, 0], passes, strict=True):
        for number, peer in enumerate(peers):
            heights = {r["spec"]: r["tflops"] for r in rows if r["pass"] == pass_ and r["peer"] == peer}
            places = [i + (number - (len(peers) - 1) / 2) * width for i in range(len(specs))]
            bars = axis.bar(places, [heights.get(spec, 0.0) for spec in specs], width, label=peer)
            axis.bar_label(bars, fmt=lambda height: f"{height:.0f}" if height else "", fontsize=7)
        axis.set_ylabel(f"{pass_}, TFLOP/s")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xticks(range(len(specs)), specs, rotation=20, ha="right")
    device = next((r["facts"]["device"] for r in reports if r["facts"].get("device")), "")
    axes[0, 0].set_title(f"Attention on {device}" if device else "Attention")
    axes[0, 0].legend(frameon=False, ncols=len(peers), fontsize=8)
    figure.tight_layout()
    # Without the version of matplotlib the same numbers give the same file.
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)
    return True
