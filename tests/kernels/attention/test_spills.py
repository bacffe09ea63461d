"""Hopper kernels have few spills. The verdicts are on record, because compiling takes minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kgen.render.rendering import render_spec
from kgen.spec.load import load
from kgen.verify.compiling import CompileOptions, compile_specs
from kgen.verify.families import problem_of

ROOT = Path(__file__).resolve().parents[3]
ALL = {"forward", "dq", "dkdv"}
FUSED = {"forward", "dq", "backward"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kernels", "without"),
    [
        ("causal", FUSED, {"dq"}),
        ("causal_d64", {"forward", "dkdv"}, {"dkdv"}),
        ("softcap_fast", FUSED, {"dq"}),
        ("broad_full", ALL, set()),
        ("mla_prefill", ALL, {"dkdv"}),
    ],
)
def test_little_spills(
    name: str, kernels: set[str], without: set[str], tmp_path: Path, verdict: Any
) -> None:
    """The limit is in bytes per thread, over all partitions.

    Spills are outside the innermost loops, or small.
    """
    folders = (ROOT / "specs", ROOT / "tests/specs")
    loaded = load(next(path for folder in folders if (path := folder / f"{name}.yaml").exists()))
    (tmp_path / name).mkdir()
    for file, text in render_spec(loaded).items():
        (tmp_path / name / file).write_text(text)
    verdict(problem_of(loaded), tmp_path)
    rows = compile_specs([loaded], tmp_path, CompileOptions(["sm_90"], targets=["triton"]))
    spills: dict[str, int] = {}
    for row in (row for row in rows if "_hopper_" in row["kernel"]):  # one row per set of constants
        spills[row["kernel"]] = max(spills.get(row["kernel"], 0), row["spills"])
    assert spills.keys() == {f"_{kernel}_hopper_kernel" for kernel in kernels}
    assert not any(spills[f"_{kernel}_hopper_kernel"] for kernel in without)
    assert max(spills.values()) <= 100
