"""`kgen explain --ranks`: the bytes of all links add up to the bytes that ranks receive."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kgen.cli import app

ROOT = Path(__file__).parents[4]
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SIZE = r"([\d.]+) (B|KiB|MiB|GiB)\b"


def said(spec: str, ranks: int, length: int) -> str:
    asked = [
        "explain",
        str(ROOT / f"specs/{spec}.yaml"),
        "--ranks",
        str(ranks),
        "--length",
        str(length),
    ]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    return done.output


def size(number: str, unit: str) -> float:
    return float(number) * UNITS[unit]


@pytest.mark.parametrize("spec", ["causal", "sliding_window"])
def test_links_add_up(spec: str) -> None:
    ranks = 8
    text = said(spec, ranks, 131072)
    received = [
        size(*found)
        for found in re.findall(rf"^  \d+ +\[.*\) +[\d.e+]+ +{SIZE}$", text, re.M)
        if found
    ]
    lines = text.split("bytes from", 1)[1].splitlines()
    begins = [found.start() - 2 for found in re.finditer(r"to \d", lines[0])]
    matrix = []
    for line in lines[1 : 1 + ranks]:
        row = line[len("  bytes from") :]
        cells = [row[a:z] for a, z in zip(begins, [*begins[1:], None], strict=True)]
        matrix.append(
            [size(*found.groups()) if (found := re.search(SIZE, cell)) else 0 for cell in cells]
        )
    assert len(received) == len(matrix) == ranks
    assert all(matrix[r][r] == 0 for r in range(ranks))
    assert [sum(row[r] for row in matrix) for r in range(ranks)] == pytest.approx(received)


def test_links_of_many_ranks_are_counted() -> None:
    assert re.search(r"r to r \+ 1 +63 +511\.5 KiB", said("sliding_window", 64, 131072))
    found = re.findall(rf"^  r to another +(\d+) +{SIZE}$", said("causal", 64, 131072), re.M)
    assert sum(int(count) for count, *_ in found) == 64 * 63
