"""Tables of speed, from the reports in `benchmarks`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from kgen.bench.best import best_peers, case_of, is_peer

FIGURES = Path(__file__).resolve().parents[3] / "benchmarks/nvidia-h200"
PASSES = ("forward", "backward")

HEAD = """\
The figures are TFLOP/s on one {device} with torch {torch} and triton {triton}, B {B}, HQ {HQ}, \
S {SQ}.
The packed specs have {tokens} tokens in total. A column with a peer shows how many times faster the
emitted kernel is.

| column | peer |
|---|---|
| Flex | FlexAttention, `torch.compile`d, Triton backend, its block mask built before the timing |
| PyTorch | `scaled_dot_product_attention`, or `varlen_attn` for packed sequences |
| Triton | the portable Triton kernels of the same file |"""

NO_COMPARISON = 100
"""Larger ratios are left out: FlexAttention sums these gradients by one atomic addition per
pair.
"""
NOTE = "[note](#gradients-of-captured-buffers)"
"""The section of docs/performance/attention.md that explains these ratios."""

Peers = dict[str, dict[str, Any]]
Rows = dict[tuple[Any, ...], Peers]


def _reports(name: str, folder: Path | None = None) -> list[dict[str, Any]]:
    path = (FIGURES if folder is None else folder) / name
    reports: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["reports"]
    return reports


def _rows(report: dict[str, Any], *keys: str) -> Rows:
    """Return the rows of a report by the values of `keys`, then by peer."""
    found: Rows = {}
    for row in report["rows"]:
        if row["error"] is None:
            found.setdefault(tuple(row[key] for key in keys), {})[row["peer"]] = row
    return found


def _times(rows: dict[str, dict[str, Any]], *peers: str) -> str:
    """Return how many times slower the first measured one of some peers is."""
    ratio = next((rows[peer]["ratio"] for peer in peers if peer in rows), None)
    if ratio is None:
        return ""
    return NOTE if ratio > NO_COMPARISON else f"{ratio:.2f}x"


@dataclass(frozen=True)
class Pair:
    """The rows of kgen and of the fastest peer, from one race."""

    own: dict[str, Any]
    peer: dict[str, Any]


def best_of_races(spec: str, pass_: str, names: Sequence[str]) -> Pair | None:
    """Return the pair with the lowest ratio in some races; None if no race has a peer."""
    found = []
    for report in (one for name in names for one in _reports(name) if one["spec"] == spec):
        peers = [row for case, row in best_peers(report["rows"]).items() if case[2] == pass_]
        own = [r for r in report["rows"] if (r["pass"], r["peer"]) == (pass_, "kgen")]
        found += [Pair(mine, dict(peer)) for peer in peers for mine in own]
    return min(found, key=lambda pair: pair.peer["ratio"], default=None)


def race(name: str = "attention.json") -> tuple[list[tuple[str, dict[str, Peers]]], dict[str, Any]]:
    """Return the specs of a race with their rows by pass and peer, and the common condition.

    Packed sequences have one batch entry with as many tokens as the batch of the other specs.
    """
    reports = _reports(name)
    (condition,) = {_condition(report) for report in reports}
    shape = reports[0]["workload"]["shape"]
    rows = [
        (r["spec"], {pass_: peers for (pass_,), peers in _rows(r, "pass").items()}) for r in reports
    ]
    return rows, {"B": shape["B"], "SQ": shape["SQ"], **dict(condition)}


def _condition(report: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    facts, shape = report["facts"], report["workload"]["shape"]
    versions = ((name, facts["versions"][name]) for name in ("torch", "triton"))
    return (
        ("device", facts["device"]),
        ("HQ", shape["HQ"]),
        ("tokens", shape["B"] * shape["SQ"]),
        *versions,
    )


def attention(name: str = "attention.json") -> str:
    """Return the table of kgen against FlexAttention, PyTorch's operators, and kgen's portable
    Triton kernels.
    """
    _, condition = race(name)
    peers = {"Flex": ("flex",), "PyTorch": ("sdpa", "varlen"), "Triton": ("kgen-triton",)}
    return f"{HEAD.format(**condition)}\n\n{_variants(_reports(name), peers)}"


def forms(tuned: str = "attention-autotune.json", flash: str = "attention-flash.json") -> str:
    """Return the table of FlexAttention's other forms. Each form was raced in its own run."""
    columns = [
        (pass_, peer, {report["spec"]: _rows(report, "pass") for report in _reports(name)})
        for pass_ in PASSES
        for peer, name in (("flex-autotune", tuned), ("flex-flash", flash))
    ]
    labels = {"flex-autotune": "max-autotune", "flex-flash": "FLASH"}
    heads = [f"{pass_}, {labels[peer]}" for pass_, peer, _ in columns]
    lines = [f"| spec | {' | '.join(heads)} |", f"|---{'|---' * len(heads)}|"]
    for spec in dict.fromkeys(spec for _, _, by_spec in columns for spec in by_spec):
        cells = [
            _times(by_spec.get(spec, {}).get((pass_,), {}), peer)
            for pass_, peer, by_spec in columns
        ]
        lines.append(f"| `{spec}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def others(name: str = "attention-others.json") -> str:
    """Return the table of the specs that are not in the first table."""
    return _variants(_reports(name), {"Flex": ("flex",), "PyTorch": ("sdpa",)})


def _variants(reports: list[dict[str, Any]], peers: dict[str, tuple[str, ...]]) -> str:
    """Return a line per spec: for each pass the TFLOP/s, and the factors by which peers are
    slower.
    """
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
    """Return the table of decoding at several cache lengths: the share of a copy's rate, and the
    factors of peers.
    """
    by_spec = {report["spec"]: _rows(report, "pass") for report in _reports(name)}
    by_spec = {
        spec: {
            int(pass_.split()[1]): peers
            for (pass_,), peers in rows.items()
            if pass_.startswith("decode ")
        }
        for spec, rows in by_spec.items()
    }
    lengths = sorted({length for rows in by_spec.values() for length in rows})
    heads = [text for length in lengths for text in (f"{length} keys", "Flex", "PyTorch")]
    lines = [f"| spec | {' | '.join(heads)} |", f"|---{'|---' * len(heads)}|"]
    for spec, rows in by_spec.items():
        cells = []
        for peers in (rows.get(length, {}) for length in lengths):
            share = (
                f"{peers['kgen']['tbps'] / peers['copy']['tbps']:.0%}".replace("%", " %")
                if peers
                else ""
            )
            cells += [share, _times(peers, "flex"), _times(peers, "sdpa")]
        if rows:
            lines.append(f"| `{spec}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def lengths(name: str = "attention-shapes.json") -> str:
    """Return the table of specs at several lengths: the TFLOP/s, and the speedup over
    FlexAttention.

    A second speedup is over max-autotune, if that was raced.
    """
    by_spec: dict[str, Rows] = {}
    for report in _reports(name):
        by_spec.setdefault(report["spec"], {}).update(_rows(report, "shape", "pass"))
    shapes = sorted(
        {shape for rows in by_spec.values() for shape, _ in rows},
        key=lambda s: int(s.split("x")[2]),
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
    """Return the table of norms of one emitted file by width, as shares of the speed of a copy.

    The best peer stands next to it, with its share and its time divided by the time of the file.
    """
    columns = (f"{norm} {pass_} | best peer" for norm in ("rms", "layer") for pass_ in PASSES)
    lines = [
        f"| width | {' | '.join(columns)} |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    by_norm = {report["spec"]: _rows(report, "pass", "width", "graph") for report in _reports(name)}
    widths = sorted({width for rows in by_norm.values() for _, width, graph in rows if not graph})
    for width in widths:
        cells = [str(width)]
        for spec in ("rms_norm", "layer_norm"):
            for pass_ in PASSES:
                times = {
                    p: row["milliseconds"] for p, row in by_norm[spec][pass_, width, False].items()
                }
                copy, own = times["copy"], times[file]
                best = min(
                    (p for p in times if p != "copy" and not p.startswith("kgen")),
                    key=times.__getitem__,
                )
                cells += [
                    f"{copy / own:.0%}",
                    f"{copy / times[best]:.0%} {best}, {times[best] / own:.2f}x",
                ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines).replace("%", " %") + "\n"


NEUTRAL = ("attention-neutral.json", "norm-neutral.json", "linear_attention-neutral.json")


def neutral(names: Sequence[str] = NEUTRAL, folder: Path | None = None) -> str:
    """Return the conditions and the table of neutral shapes: the rate of kgen by pass, and the time
    of the best peer divided by kgen's.

    Without reports, return a sentence that says so.
    """
    there = [name for name in names if ((folder or FIGURES) / name).is_file()]
    reports = [one for name in there for one in _reports(name, folder)]
    rows = [row for one in reports for row in one["rows"]]
    if not rows:
        return "The repository has no report of these sizes yet.\n"
    own = {case_of(row): row for row in rows if row["peer"] == "kgen" and row["error"] is None}
    best = best_peers(rows)
    passes = list(dict.fromkeys(case[2].split()[0] for case in own))
    heads = [text for name in passes for text in (name, "best peer")]
    lines = [*_conditions(reports), ""]
    lines += [f"| spec | size | {' | '.join(heads)} |", f"|---|---|{'---|' * len(heads)}"]
    for spec, shape in dict.fromkeys(case[:2] for case in own):
        cells = []
        for name in passes:
            cases = [c for c in own if c[:2] == (spec, shape) and c[2].split()[0] == name]
            texts = [_against_best(own[case], best.get(case)) for case in cases]
            cells += [", ".join(column) for column in zip(*texts, strict=True)] or ["", ""]
        lines.append(f"| `{spec}` | {shape} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _conditions(reports: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of the devices, the versions and the peers that were measured."""
    facts = [report["facts"] for report in reports]
    versions = {f"{name} {v}" for one in facts for name, v in one["versions"].items()}
    rows = [row for report in reports for row in report["rows"] if row["error"] is None]
    peers = dict.fromkeys(row["peer"] for row in rows if is_peer(row["peer"]))
    cells = {
        "GPU": ", ".join(sorted({one["device"] for one in facts})),
        "versions": ", ".join(sorted(versions)),
        "peers": ", ".join(f"`{name}`" for name in peers),
    }
    return ["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in cells.items())]


def _against_best(own: dict[str, Any], peer: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return the rate of kgen, and the ratio and the name of the best peer."""
    flops = own["tflops"] is not None
    rate = f"{own['tflops']:.0f} TFLOP/s" if flops else f"{own['tbps']:.2f} TB/s"
    return rate, f"{peer['ratio']:.2f}x {peer['peer']}" if peer else ""


@dataclass(frozen=True)
class _Summarized:
    """A line of the summary: the ratios of one peer in some files."""

    kernels: str
    peer: str
    key: str
    files: tuple[str, ...]
    decode: bool = False

    def ratios(self, pass_: str) -> Iterator[tuple[float, str]]:
        """Yield each ratio of a pass with the case that it belongs to."""
        for report in (report for file in self.files for report in _reports(file)):
            for row in report["rows"]:
                counts = row["peer"] == self.key and row["error"] is None and not row.get("graph")
                first, *size = row["pass"].split(maxsplit=1)
                if counts and first == pass_ and row["ratio"] <= NO_COMPARISON:
                    yield row["ratio"], " ".join([f"`{report['spec']}`", *_size(row, size)])


def _size(row: dict[str, Any], size: list[str]) -> list[str]:
    """Name the size of a case where the cases of a line differ in it."""
    if "shape" in row:
        return [f"at {row['shape'].split('x')[2]}"]
    return [f"at {size[0]}"] if size else [f"at {row['width']}"] if "width" in row else []


_ALL = ("attention.json", "attention-others.json")
_SUMMARY = (
    _Summarized("attention, S 8192", "FlexAttention", "flex", _ALL),
    _Summarized("attention, S 1024 to 16384", "FlexAttention", "flex", ("attention-shapes.json",)),
    _Summarized(
        "attention, S 8192",
        "FlexAttention, max-autotune",
        "flex-autotune",
        ("attention-autotune.json",),
    ),
    _Summarized(
        "attention, S 1024 to 16384",
        "FlexAttention, max-autotune",
        "flex-autotune",
        ("attention-shapes.json",),
    ),
    _Summarized("attention, S 8192", "FlashAttention-4", "flex-flash", ("attention-flash.json",)),
    _Summarized("attention, S 8192", "PyTorch SDPA", "sdpa", _ALL),
    _Summarized("packed attention", "PyTorch `varlen_attn`", "varlen", ("attention.json",)),
    _Summarized("decoding", "FlexAttention", "flex", ("attention-others.json",), decode=True),
    _Summarized("decoding", "PyTorch SDPA", "sdpa", ("attention-others.json",), decode=True),
    _Summarized("norms in CUDA", "quack", "quack", ("norm.json",)),
    _Summarized("norms in CUDA", "liger", "liger", ("norm.json",)),
    _Summarized("norms in CUDA", "torch.compile", "compile", ("norm.json",)),
    _Summarized("gated-delta output", "fla", "fla", ("chunk_output.json",)),
)


def summary() -> str:
    """Geometric mean and least ratio against each peer, over all cases that were measured."""
    lines = ["| kernels | peer | forward | worst | backward | worst |", "|---|---|---|---|---|---|"]
    for line in _SUMMARY:
        cells = [line.kernels, line.peer]
        for pass_ in ("decode",) if line.decode else PASSES:
            found = list(line.ratios(pass_))
            if not found:
                cells += ["", ""]
                continue
            mean = prod(ratio for ratio, _ in found) ** (1 / len(found))
            least, case = min(found)
            cells += [f"**{mean:.2f}x** ({len(found)})", f"{least:.2f}x {case}"]
        lines.append(f"| {' | '.join(cells + ['', ''] * line.decode)} |")
    return "\n".join(lines) + "\n"
