"""Rows that are too far apart for narrow offsets: the check finds a kernel that computes narrow
offsets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.interpreters.own_process import interpreted

from kgen.render.rendering import render_spec
from kgen.spec.load import loads
from kgen.verify.families import Subject, problem_of
from kgen.verify.toolchain import import_file

SPEC = """kernel: chunk_output
name: far
dtype: fp16
head_dim: 64
chunk_size: 64
decay: g_gamma[h] * (1 + i)
passes: [forward]
targets: {triton: {}}
"""
WIDE = {
    "": "",
    "dimension 2 of v": "h * stride_vh",
    "dimension 1 of k": "first * stride_kt",
    "dimension 0 of h": "b * stride_hb",
}


@pytest.mark.thorough
@pytest.mark.parametrize("where", WIDE)
def test_what_lies_far_apart_is_found(where: str, tmp_path: Path, verdict: Any) -> None:
    loaded = loads(SPEC, "far.yaml")
    text = next(iter(render_spec(loaded, single=True).values()))
    if wide := WIDE[where]:
        assert wide in text
        text = text.replace(wide, f"({wide}) % 2**20")
    verdict(problem_of(loaded), text)
    path = tmp_path / "far.py"
    path.write_text(text)
    if where:
        with pytest.raises(AssertionError, match=where):
            interpreted(_reached, path)
    else:
        interpreted(_reached, path)


def _reached(path: Path) -> None:
    """Run the check with 2**20 instead of 2**31."""
    from kgen.kernels.chunk_output.verify import checks
    from kgen.verify import interpreter

    interpreter.mend()
    problem = problem_of(loads(SPEC, "far.yaml"))
    with mock.patch.object(checks, "FAR", 2**20):
        checks.reaches_far(Subject(problem, "triton", path, import_file(path, "far"), "cpu"))
