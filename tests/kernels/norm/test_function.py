"""The parts of the spec's function that targets share."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from kgen.kernels.norm.plan.planning import plan_norm
from kgen.kernels.norm.targets.cuda import launcher as cuda
from kgen.kernels.norm.targets.function import NormDocstring, NormFunction, norm_function
from kgen.kernels.norm.targets.triton import launcher_templates as triton
from kgen.spec.load import load

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", ["rms_norm", "qk_norm", "layer_norm"])
def test_the_common_parts_come_from_the_plan(name: str) -> None:
    plan = plan_norm(load(ROOT / f"specs/{name}.yaml"))
    made = norm_function(plan, ["x"], {})
    assert (made.name, made.x_dims) == (name, 1 + (name == "qk_norm"))
    assert made.signature.startswith("x, ")


def test_no_target_states_a_common_part_again() -> None:
    for module in (cuda, triton):
        for own, base in ((module.Function, NormFunction), (module.Docstring, NormDocstring)):
            assert issubclass(own, base)
            assert not {f.name for f in fields(base)} & {*own.__annotations__}
