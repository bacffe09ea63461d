"""Positions in cache specs have a declared bound, so that sums of them are proved to fit 32
bits.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kgen.kernels.attention.adapt.derived import FURTHEST, PLACES, Variant
from kgen.kernels.attention.adapt.part import PartSpec
from kgen.kernels.attention.prove.claims import INT32
from kgen.kernels.attention.prove.obligations import obligations
from kgen.kernels.attention.prove.setting import Extent
from kgen.prove.obligations import Verdict, decide
from kgen.spec.load import load, loads

ROOT = Path(__file__).resolve().parents[4]


def verdicts(text: str) -> set[Verdict]:
    """Return the verdicts on 32-bit sums for the first tile shape of each kernel."""
    extent = Extent(lambda shapes: shapes[:1])
    return {
        decide(one, 10).verdict
        for one in obligations(loads(text, "cached.yaml"), extent)
        if one.what == INT32
    }


@pytest.mark.parametrize(
    "name", ["causal", pytest.param("sliding_window", marks=pytest.mark.thorough)]
)
def test_sums_of_positions_fit_32_bits(name: str) -> None:
    text = Variant(load(ROOT / f"specs/{name}.yaml")).cached()
    assert all(
        f"{place}: {{shape: [B], dtype: int32, within: {FURTHEST}}}" in text for place in PLACES
    )
    assert verdicts(text) == {Verdict.PROVED}
    assert Verdict.REFUTED in verdicts(re.sub(r", within: \d+", "", text))


def test_sums_of_positions_of_a_part_fit_32_bits() -> None:
    text = PartSpec(Variant(load(ROOT / "specs/sliding_window.yaml"))).text()
    assert f"q_start: {{type: int, runtime: true, within: {FURTHEST}}}" in text.replace(
        "\n    ", " "
    )
    assert verdicts(text) == {Verdict.PROVED}
    assert Verdict.REFUTED in verdicts(re.sub(r", within: \d+", "", text))
