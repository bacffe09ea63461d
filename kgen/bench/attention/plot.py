"""Bars of throughput, by spec and peer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kgen.bench import plotting


def plot(reports: Sequence[dict[str, Any]], path: Path) -> bool:
    """Draw TFLOP/s of every peer, forward above backward. False, with a note, where matplotlib is missing."""
    pyplot = plotting.pyplot()
    if pyplot is None:
        return False
    rows = [row for report in reports for row in report["rows"] if row["tflops"] is not None]
    passes = [name for name in ("forward", "backward") if any(row["pass"] == name for row in rows)]
    if not passes:
        return False
    specs = list(dict.fromkeys(row["spec"] for row in rows))
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    size = (max(6.0, 1.1 * len(specs) * max(1.0, 0.35 * len(peers))), 3.2 * len(passes))
    figure, axes = pyplot.subplots(len(passes), 1, figsize=size, sharex=True, squeeze=False)
    for axis, pass_ in zip(axes[:, 0], passes, strict=True):
        series = {
            peer: {r["spec"]: r["tflops"] for r in rows if (r["pass"], r["peer"]) == (pass_, peer)}
            for peer in peers
        }
        plotting.bars(axis, specs, series, "%.0f")
        axis.set_ylabel(f"{pass_}, TFLOP/s")
    axes[-1, 0].set_xticks(range(len(specs)), specs, rotation=20, ha="right")
    axes[0, 0].set_title(plotting.on_device("Attention", reports))
    axes[0, 0].legend(frameon=False, ncols=len(peers), fontsize=8)
    plotting.save(figure, path)
    return True
