"""The slowest corner specs of attention in Triton's interpreter.

`scripts/test --all` runs them. Other runs require their verdict on record.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.interpreters.against_float64 import CORNERS, assert_right

LONG = (
    *("apart", "batched_documents", "broad_full", "broad_images", "broad_learned", "broad_padded"),
    *("packed_broad", "packed_latent", "packed_softcap", "packed_window"),
    *("near", "pages_of_256", "by_distance"),
)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "path", [path for path in CORNERS if path.stem in LONG], ids=lambda p: p.stem
)
def test_verdicts_of_the_interpreter(path: Path, tmp_path: Path, verdict: Any) -> None:
    assert_right(path, tmp_path, verdict)
