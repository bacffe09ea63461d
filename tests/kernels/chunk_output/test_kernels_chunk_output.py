"""Emitted chunk_output against float64 in Triton's interpreter: a stock spec, and corner specs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.interpreters.against_float64 import CORNERS, ROOT, assert_right, of_family

SPECS = [*of_family("chunk_output", CORNERS), ROOT / "specs/gated_delta_output_varlen.yaml"]
SLOW = {"chunk_wide": 9, "gated_delta_output_varlen": 9, "chunk_mixed": 3}
"""Slow specs: one of this number of their cases runs here. `kgen verify` runs all cases."""


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_verified_in_the_interpreter(path: Path, tmp_path: Path, verdict: Any) -> None:
    assert_right(path, tmp_path, verdict, SLOW.get(path.stem, 1))
