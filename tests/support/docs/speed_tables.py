"""Tables of speed, from the figures in `benchmarks`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).resolve().parents[3] / "benchmarks/nvidia-h200"
PASSES = ("forward", "backward")

HEAD = """\
TFLOP/s on one {device} and how many times faster than FlexAttention (`torch.compile`d, Triton backend, with its block
mask built beforehand), than PyTorch's own (`scaled_dot_product_attention`; `varlen_attn` for packed sequences) where
that has the variant, and than the Triton kernels of the same file, which serve every other chip, where there are
kernels for Hopper. B {B}, HQ {HQ}, S {SQ}, packed sequences {tokens} tokens in all; medians of interleaved rounds in
one run with torch {torch} and triton {triton}; above 1 the emitted kernel is faster."""

Peers = dict[str, dict[str, Any]]
Rows = dict[tuple[Any, ...], Peers]


def _reports(name: str) -> list[dict[str, Any]]:
    reports: list[dict[str, Any]] = json.loads((FIGURES / name).read_text(encoding="utf-8"))["reports"]
    return reports


def _rows(report: dict[str, Any], *keys: str) -> Rows:
    """Of a report: by the values of some keys, then by peer."""
    found: Rows = {}
    for row in report["rows"]:
        if row["error"] is None:
            found.setdefault(tuple(row[key] for key in keys), {})[row["peer"]] = row
    return found


def _times(rows: dict[str, dict[str, Any]], *peers: str) -> str:
    """How many times slower the first of some peers is that was measured."""
    ratio = next((rows[peer]["ratio"] for peer in peers if peer in rows), None)
    return "" if ratio is None else f"{ratio:.2f}x"


def race(name: str = "attention.json") -> tuple[list[tuple[str, dict[str, Peers]]], dict[str, Any]]:
    """Each spec of a race with its rows by pass and by peer, and the condition that all were measured in. Packed
    sequences have as many tokens as the batch of the others, in a batch of one."""
    reports = _reports(name)
    (condition,) = {_condition(report) for report in reports}
    shape = reports[0]["workload"]["shape"]
    rows = [(r["spec"], {pass_: peers for (pass_,), peers in _rows(r, "pass").items()}) for r in reports]
    return rows, {"B": shape["B"], "SQ": shape["SQ"], **dict(condition)}


def _condition(report: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    facts, shape = report["facts"], report["workload"]["shape"]
    versions = ((name, facts["versions"][name]) for name in ("torch", "triton"))
    return ("device", facts["device"]), ("HQ", shape["HQ"]), ("tokens", shape["B"] * shape["SQ"]), *versions


def attention(name: str = "attention.json") -> str:
    """Each spec beside FlexAttention, what PyTorch has of its own, and kgen's Triton kernels for every chip."""
    _, condition = race(name)
    peers = {"Flex": ("flex",), "PyTorch": ("sdpa", "varlen"), "Triton": ("kgen-triton",)}
    return f"{HEAD.format(**condition)}\n\n{_variants(_reports(name), peers)}"


def forms(tuned: str = "attention-autotune.json", flash: str = "attention-flash.json") -> str:
    """How many times slower FlexAttention's other forms are, each raced by itself."""
    columns = [
        (pass_, peer, {report["spec"]: _rows(report, "pass") for report in _reports(name)})
        for pass_ in PASSES
        for peer, name in (("flex-autotune", tuned), ("flex-flash", flash))
    ]
    labels = {"flex-autotune": "max-autotune", "flex-flash": "FLASH"}
    heads = [f"{pass_}, {labels[peer]}" for pass_, peer, _ in columns]
    lines = [f"| spec | {' | '.join(heads)} |", f"|---{'|---' * len(heads)}|"]
    for spec in dict.fromkeys(spec for _, _, by_spec in columns for spec in by_spec):
        cells = [_times(by_spec.get(spec, {}).get((pass_,), {}), peer) for pass_, peer, by_spec in columns]
        lines.append(f"| `{spec}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def others(name: str = "attention-others.json") -> str:
    """The specs that are not in the first table, in less detail."""
    return _variants(_reports(name), {"Flex": ("flex",), "PyTorch": ("sdpa",)})


def _variants(reports: list[dict[str, Any]], peers: dict[str, tuple[str, ...]]) -> str:
    """A line for each spec: for each pass TFLOP/s, and how many times slower peers are."""
    heads = [text for pass_ in PASSES for text in (pass_, *peers)]
    lines = [f"| spec | {' | '.join(heads)} |", f"|---{'|---' * len(heads)}|"]
    for report in reports:
        rows, cells = _rows(report, "pass"), [f"`{report['spec']}`"]
        for pass_ in PASSES:
            own = rows.get((pass_,), {})
            cells.append(f"{own['kgen']['tflops']:.0f}" if own else "")
            cells += [_times(own, *names) for names in peers.values()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def decoding(name: str = "attention-others.json") -> str:
    """One query over caches of several lengths: the share of a copy's rate, and how many times slower peers are."""
    by_spec = {report["spec"]: _rows(report, "pass") for report in _reports(name)}
    by_spec = {
        spec: {
            int(pass_.split()[1]): peers for (pass_,), peers in rows.items() if pass_.startswith("decode ")
        }
        for spec, rows in by_spec.items()
    }
    lengths = sorted({length for rows in by_spec.values() for length in rows})
    heads = [text for length in lengths for text in (f"{length} keys", "Flex", "PyTorch")]
    lines = [f"| spec | {' | '.join(heads)} |", f"|---{'|---' * len(heads)}|"]
    for spec, rows in by_spec.items():
        cells = []
        for peers in (rows.get(length, {}) for length in lengths):
            share = f"{peers['kgen']['tbps'] / peers['copy']['tbps']:.0%}".replace("%", " %") if peers else ""
            cells += [share, _times(peers, "flex"), _times(peers, "sdpa")]
        if rows:
            lines.append(f"| `{spec}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def lengths(name: str = "attention-shapes.json") -> str:
    """Specs at several lengths: TFLOP/s, and how many times faster than FlexAttention, by default and, where that was
    raced, with max-autotune."""
    by_spec: dict[str, Rows] = {}
    for report in _reports(name):
        by_spec.setdefault(report["spec"], {}).update(_rows(report, "shape", "pass"))
    shapes = sorted(
        {shape for rows in by_spec.values() for shape, _ in rows}, key=lambda s: int(s.split("x")[2])
    )
    lines = [
        f"| | {' | '.join(shape.split('x')[2] for shape in shapes)} |",
        f"|---{'|---' * len(shapes)}|",
    ]
    for spec, rows in by_spec.items():
        for pass_ in PASSES:
            cells = [rows.get((shape, pass_), {}) for shape in shapes]
            texts = [", ".join(filter(None, _by_length(c))) for c in cells]
            lines.append(f"| `{spec}` {pass_} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def _by_length(rows: dict[str, dict[str, Any]]) -> list[str]:
    own = [f"{rows['kgen']['tflops']:.0f}"] if rows else []
    return [*own, *(_times(rows, peer) for peer in ("flex", "flex-autotune"))]


def norms(file: str, name: str = "norm.json") -> str:
    """The norms of one of the emitted files as shares of a copy, at each width, beside the best of what others wrote:
    its share, and its time over that of the file."""
    lines = [
        f"| width | {' | '.join(f'{norm} {pass_} | best peer' for norm in ('rms', 'layer') for pass_ in PASSES)} |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    by_norm = {report["spec"]: _rows(report, "pass", "width", "graph") for report in _reports(name)}
    widths = sorted({width for rows in by_norm.values() for _, width, graph in rows if not graph})
    for width in widths:
        cells = [str(width)]
        for spec in ("rms_norm", "layer_norm"):
            for pass_ in PASSES:
                times = {p: row["milliseconds"] for p, row in by_norm[spec][pass_, width, False].items()}
                copy, own = times["copy"], times[file]
                best = min(
                    (p for p in times if p != "copy" and not p.startswith("kgen")), key=times.__getitem__
                )
                cells += [f"{copy / own:.0%}", f"{copy / times[best]:.0%} {best}, {times[best] / own:.2f}x"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines).replace("%", " %") + "\n"
