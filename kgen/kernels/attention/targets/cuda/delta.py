"""The CUDA target of attention: the delta of its backward pass, the one pass that this target has."""

from __future__ import annotations

from kgen.kernels.attention.plan.delta import plan_delta
from kgen.spec.load import Loaded
from kgen.targets import Source
from kgen.targets.arguments import NO_BACKWARD, NO_NUMBERS, cast_lines, dense, derivative_fields
from kgen.targets.cuda.elements import ELEMENTS, used
from kgen.targets.template import Untyped
from kgen.targets.triton.text import TORCH_DTYPES

TENSORS = ("out", "dout", "dlse")


def sources(loaded: Loaded) -> list[Source]:
    """`cuda.cu` with the kernel and its C launcher, `cuda.py` with the PyTorch operator."""
    context = _context(loaded)
    return [
        Source("cuda.cu", Untyped("attention/cuda/delta.cu.j2", context), comment="//"),
        Source("cuda.py", Untyped("attention/cuda/delta.py.j2", context)),
    ]


def _context(loaded: Loaded) -> dict[str, object]:
    spec, plan = loaded.spec, plan_delta(loaded.spec)
    dtypes = {"out": spec.dtype, "dout": spec.dtype, "dlse": "fp32"}
    return {
        "name": f"{spec.name}_delta",
        "summary": f"The delta of the backward pass of `{spec.name}`.",
        "width": spec.head_dim.v,
        "dtype": spec.dtype,
        "torch_dtype": TORCH_DTYPES[spec.dtype],
        "casts": cast_lines({n: f"torch.{TORCH_DTYPES[d]}" for n, d in dtypes.items()}),
        "element": ELEMENTS[spec.dtype],
        "elements": used({spec.dtype, "fp32"}) | {"loaded_once": True},
        "rounds": False,
        "least_major_minor": "8, 0",
        "least_words": "8.0",
        "plan": plan,
        "rows": plan.rows,
        "divisible": "" if spec.head_dim.v % plan.vector == 0 else "False and ",
        **derivative_fields(TENSORS, dict.fromkeys(TENSORS, NO_BACKWARD), derived=False),
        **NO_NUMBERS,
        "dense_check": dense(TENSORS),
        "dynamic_shared": False,
        "shared_argument": "0",
        "config_arguments": "grid, block",
        "launch_config": "grid=grid, block=block",
    }
