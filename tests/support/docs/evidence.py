"""Table of the documentation with the results of fuzzing, mutants and sanitizers, from the checked-in reports."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuzzing.explained import EXPLAINED
from on_gpu import large, repeating

from kgen.verify.sanitizing import TOOLS

ROOT = Path(__file__).resolve().parents[3]


def table() -> str:
    """Return a table of random specs, mutants and sanitizers."""
    rows = [*_random_specs(), *_mutants(), *_sanitizers(), *repeating.rows(), *large.rows()]
    return (
        "\n".join(["| what | found |", "|---|---|", *(f"| {what} | {found} |" for what, found in rows)])
        + "\n"
    )


def _read(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items(), key=lambda item: -item[1]))


def _random_specs() -> Iterator[tuple[str, str]]:
    seeds = _read("tests/fuzzing/seeds.json")
    yield f"{seeds['tried']} random specs on the CPU", f"{_counted(seeds['outcomes'])}"
    unmended = f"{len(EXPLAINED)} of them explained in `tests/fuzzing/explained.py`"
    yield "of these that failed", f"mended since, but for {unmended}"
    yield (
        "of these that FlexAttention was asked about",
        f"{seeds['flexed']}, where it gives what the reference gives",
    )
    yield "of these refused, by error", _counted(seeds["refused"])
    for counts in seeds["before"].values():
        yield f"{sum(counts.values())} of an earlier generator", f"{_counted(counts)}; all mended since"
    cuda = _read("tests/fuzzing/seeds_cuda.json")
    yield (
        f"{cuda['tried']} random specs on a GPU",
        f"{_counted(cuda['outcomes'])}; what failed is mended since",
    )


def _mutants() -> Iterator[tuple[str, str]]:
    report = _read("tests/mutating/report.json")
    by_file: dict[str, Counter[str]] = {}
    by_operator: dict[str, Counter[str]] = {}
    for file, found in sorted(report.items()):
        for operator, counts in found["operators"].items():
            by_file.setdefault(f"of `{file}`", Counter()).update(counts)
            by_operator.setdefault(f"by {operator}", Counter()).update(counts)
    total = sum(by_file.values(), Counter())
    told = Counter(one["on"]["device"] for row in report.values() for one in row["survivors"] if "on" in one)
    found, unknown = total["killed"] + told.total(), total["gpu"] - told.total()
    share = f"{found / max(1, found + total['lived']):.1%} of those that change what comes out are found"
    yield f"{total.total()} mutants", f"{_counted(total)}: {share}" + f", {unknown} not run" * bool(unknown)
    for device, count in told.items():
        yield f"mutants for a GPU, on {device}", f"{count} run and found"
    for of, counts in (*by_file.items(), *sorted(by_operator.items())):
        yield f"mutants {of}", _counted(counts)


def _sanitizers() -> Iterator[tuple[str, str]]:
    clean: Counter[tuple[str, str]] = Counter()
    for entry in _read("generated/verified.json")["files"].values():
        places = (place.partition(" ") for place in entry["records"])
        clean.update((tool, device) for tool, _, device in places if tool in TOOLS)
    for (tool, device), count in sorted(clean.items()):
        yield f"`{tool}` on {device}", f"nothing in {count} files"
