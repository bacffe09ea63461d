"""Attention in fp32 from C.

Its log-sum-exps are float64, so that backward recomputes P to the last bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.packages.c_on_paper import packages_of, run_example

SPEC = """kernel: attention
name: single
dtype: fp32
head_dim: 16
gqa: 2
mask_mod: q_idx >= kv_idx
score_mod: score + 0.1 * (kv_idx - q_idx)
passes: [forward, backward, decode]
"""


@pytest.mark.thorough
def test_the_example_is_right_on_paper(tmp_path: Path) -> None:
    folder = packages_of({"single": SPEC}, tmp_path)
    header = next((folder / "single").rglob("single.h")).read_text()
    assert "[B, HQ, SQ] float64, contiguous, the log-sum-exp" in header
    done = run_example(folder / "single")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": right") >= 5
