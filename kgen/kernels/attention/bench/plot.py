"""Bar charts of throughput by spec and peer, and of decoding by cache length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kgen.bench import plotting
from kgen.bench.best import is_peer


def plot(reports: Sequence[dict[str, Any]], path: Path) -> bool:
    """Draw TFLOP/s of forward and backward, and TB/s of decoding, one panel each.

    The label of the best peer of each group is bold.
    Return False if matplotlib is missing or there is nothing to draw.
    """
    pyplot = plotting.pyplot()
    if pyplot is None:
        return False
    # Panels by their quantity, with bars as (group, peer, height).
    panels: dict[str, list[tuple[str, str, float]]] = {
        "forward, TFLOP/s": [],
        "backward, TFLOP/s": [],
    }
    for row in (row for report in reports for row in report["rows"]):
        name, _, keys = row["pass"].partition(" ")
        if row["tflops"] is not None:
            panels[f"{name}, TFLOP/s"].append((row["spec"], row["peer"], row["tflops"]))
        elif name == "decode" and row["tbps"] is not None:
            group = f"{row['spec']}, {keys}"
            panels.setdefault("decode, TB/s", []).append((group, row["peer"], row["tbps"]))
    panels = {label: found for label, found in panels.items() if found}
    if not panels:
        return False
    peers = list(dict.fromkeys(peer for found in panels.values() for _, peer, _ in found))
    groups = {
        label: list(dict.fromkeys(group for group, _, _ in found))
        for label, found in panels.items()
    }
    most = max(len(names) for names in groups.values())
    size = (max(6.0, 1.1 * most * max(1.0, 0.35 * len(peers))), 3.6 * len(panels))
    figure, axes = pyplot.subplots(len(panels), 1, figsize=size, squeeze=False)
    for axis, (label, found) in zip(axes[:, 0], panels.items(), strict=True):
        series = {
            peer: {group: height for group, p, height in found if p == peer} for peer in peers
        }
        form = "%.2f" if label.startswith("decode") else "%.0f"
        plotting.bars(axis, groups[label], series, form, _best(found))
        axis.set_ylabel(label)
        axis.set_xticks(range(len(groups[label])), groups[label], rotation=20, ha="right")
    axes[0, 0].set_title(plotting.on_device("Attention", reports))
    # A panel may lack bars of some peers.
    legend = [
        pyplot.Rectangle((0, 0), 1, 1, color=f"C{number}", label=peer)
        for number, peer in enumerate(peers)
    ]
    axes[0, 0].legend(handles=legend, frameon=False, ncols=len(peers), fontsize=8)
    plotting.save(figure, path)
    return True


def _best(found: Sequence[tuple[str, str, float]]) -> dict[str, str]:
    """Return the peer with the highest bar in each group."""
    peers = [one for one in found if is_peer(one[1])]
    return {group: peer for group, peer, _ in sorted(peers, key=lambda one: one[2])}
