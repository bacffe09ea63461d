"""Tables of the documentation: the results of random specs, mutants and sanitizers, from checked-in
reports.
"""

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

WORDS = {
    "crash": "internal error",
    "wrong": "wrong result",
    "spelling": "another file for an equivalent spec",
    "reference": "reference differs from FlexAttention",
    "slow": "over the time limit",
    "refused: zero-division": "refused, division by zero",
    "refused: wrong-type": "refused, wrong type",
    "killed": "found",
    "equivalent": "no effect",
    "slower": "same results, more loads",
    "gpu": "run only on a GPU",
    "lived": "not found",
}
"""Outcomes in the words of the page. `right` and `refused` stay."""


def table() -> str:
    """Random specs, mutants and sanitizers, each with its result."""
    rows = [*_random_specs(), *_mutants(), *_sanitizers(), *repeating.rows(), *large.rows()]
    lines = ["| run | result |", "|---|---|", *(f"| {what} | {result} |" for what, result in rows)]
    return "\n".join(lines) + "\n"


def _read(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def _counted(counts: dict[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return "; ".join(f"{WORDS.get(outcome, outcome)}: {count:,}" for outcome, count in ordered)


def _random_specs() -> Iterator[tuple[str, str]]:
    seeds = _read("tests/fuzzing/seeds.json")
    before: Counter[str] = sum((Counter(counts) for counts in seeds["before"].values()), Counter())
    explained = f"; {len(EXPLAINED)} explained in `tests/fuzzing/explained.py`" * bool(EXPLAINED)
    yield f"{seeds['tried']:,} random specs on the CPU", _counted(seeds["outcomes"]) + explained
    for family, own in seeds.get("families", {}).items():
        yield f"{own['tried']:,} random specs of `{family}` on the CPU", _counted(own["outcomes"])
    yield (
        f"{before.total():,} random specs of earlier generators",
        f"{_counted(before)}. All errors are fixed.",
    )
    yield "references compared with FlexAttention", f"{seeds['flexed']} agree"
    cuda = _read("tests/fuzzing/seeds_cuda.json")
    yield (
        f"{cuda['tried']:,} random specs on a GPU",
        f"{_counted(cuda['outcomes'])}. All errors are fixed.",
    )
    expressions = _read("tests/fuzzing/expressions.json")
    yield f"{expressions['tried']:,} random expressions", _counted(expressions["outcomes"])


def _mutants() -> Iterator[tuple[str, str]]:
    report = _read("tests/mutating/report.json")
    by_operator = (counts for row in report.values() for counts in row["operators"].values())
    total: Counter[str] = sum(map(Counter, by_operator), Counter())
    on_gpu = Counter(
        one["on"]["device"] for row in report.values() for one in row["survivors"] if "on" in one
    )
    found, unknown = total["killed"] + on_gpu.total(), total["gpu"] - on_gpu.total()
    share = f"{found / max(1, found + total['lived']):.1%} of the mutants that change a result"
    result = f"{_counted(total)}. Found: {share}" + f"; {unknown} were not run" * bool(unknown)
    yield f"{total.total():,} mutants of {len(report)} files", result
    for device, count in on_gpu.items():
        yield f"mutants that run only on a GPU, on {device}", f"{count} found"


def _sanitizers() -> Iterator[tuple[str, str]]:
    clean: dict[str, Counter[str]] = {}
    for entry in _read("generated/verified.json")["files"].values():
        for tool, _, device in (place.partition(" ") for place in entry["records"]):
            if tool in TOOLS:
                clean.setdefault(tool, Counter()).update([device])
    for tool, devices in sorted(clean.items()):
        found = (f"{count} files on {device}" for device, count in sorted(devices.items()))
        yield f"`{tool}`", f"no error in {', '.join(found)}"
