"""Bounds of run-time integers: every call checks them, in Python and in C."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.interpreters.own_process import interpreted

from kgen.kernels.attention.targets.triton.native import native
from kgen.render.rendering import render_spec
from kgen.spec.load import loads
from kgen.verify.toolchain import import_file

SPEC = """kernel: attention
name: near
dtype: bf16
head_dim: 16
params: {{reach: {{type: int, runtime: true{within}}}}}
mask_mod: q_idx - kv_idx < reach
passes: [forward]
"""
BOUNDS = [
    ("", 2**30, "2**30"),
    (", within: 134217728", 2**27, "2**27"),
    (", within: 200000", 200_000, "200000"),
]


def _messages(path: Path, values: list[int]) -> list[str | None]:
    """Return the error of a call with each value, or None."""
    function = import_file(path, "near_triton").near
    q = torch.zeros(1, 1, 4, 16, dtype=torch.bfloat16)
    found: list[str | None] = []
    for value in values:
        try:
            function(q, q, q, reach=value)
            found.append(None)
        except ValueError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(("within", "most", "spelled"), BOUNDS)
def test_a_call_checks_the_bound(within: str, most: int, spelled: str, tmp_path: Path) -> None:
    for name, text in render_spec(loads(SPEC.format(within=within), "near.yaml")).items():
        path = tmp_path / "near" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    wrong = [most + 1, -most - 1]
    said = interpreted(_messages, tmp_path / "near" / "triton.py", [most, -most, *wrong])
    assert said == [
        None,
        None,
        *(f"near: reach must lie within {spelled} of zero, got {n}" for n in wrong),
    ]


@pytest.mark.parametrize(("within", "most", "spelled"), BOUNDS)
def test_c_checks_the_bound(within: str, most: int, spelled: str) -> None:
    program: Any = native(loads(SPEC.format(within=within), "near.yaml"), {}, [80]).program
    checks = [check for check in program.checks if "reach" in check.message]
    power = (
        f"INT64_C(1) << {most.bit_length() - 1}" if most.bit_count() == 1 else f"INT64_C({most})"
    )
    assert [check.wrong for check in checks] == [f"a->reach > {power} || a->reach < -({power})"]
    assert f"reach must lie within {spelled} of zero" in checks[0].message
