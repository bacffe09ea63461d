"""Emitted norms against float64 in Triton's interpreter: corner specs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.interpreters.against_float64 import CORNERS, assert_right, of_family

SLOW = dict.fromkeys(("norm_bare", "norm_modified", "norm_rounded"), 2)
"""Slow specs: one of this number of their cases runs here. `kgen verify` runs all cases."""


@pytest.mark.parametrize("path", of_family("norm", CORNERS), ids=lambda p: p.stem)
def test_verified_in_the_interpreter(path: Path, tmp_path: Path, verdict: Any) -> None:
    assert_right(path, tmp_path, verdict, SLOW.get(path.stem, 1))
