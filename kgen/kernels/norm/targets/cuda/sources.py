"""The CUDA target of norms: a plan becomes the names that `templates/norm/cuda/norm.cu.j2` and `norm.py.j2` use."""

from __future__ import annotations

from kgen.expr.functions import in_order
from kgen.kernels.norm.plan.planning import NormPlan, plan_norm
from kgen.kernels.norm.targets.cuda.kernels import KernelFields
from kgen.kernels.norm.targets.cuda.launcher import LauncherFields
from kgen.kernels.norm.targets.cuda.names import FUNCTIONS
from kgen.kernels.norm.targets.formula import formula
from kgen.spec.load import Loaded
from kgen.targets import Source, opening
from kgen.targets.cuda.elements import used
from kgen.targets.cuda.loader import Loader
from kgen.targets.template import Untyped

SUMS = {
    "layer": [
        {"name": "sums", "value": "h[i]", "total": "sum", "of_mean": True},
        {
            "name": "deviations",
            "value": "(h[i] - mean) * (h[i] - mean)",
            "total": "squares",
            "of_mean": False,
        },
    ],
    "rms": [{"name": "sums", "value": "h[i] * h[i]", "total": "squares", "of_mean": False}],
}
"""What a thread sums over its part of a row, by the norm."""


def sources(loaded: Loaded) -> list[Source]:
    """`cuda.cu` with the kernels, `cuda.py` with the operators."""
    context = _context(plan_norm(loaded))
    return [
        Source("cuda.cu", Untyped("norm/cuda/norm.cu.j2", context), comment="//", reserved=FUNCTIONS),
        Source(
            "cuda.py",
            Untyped("norm/cuda/norm.py.j2", context),
            rank=2,
            needs="cuda.core",
            signature=str(context["signature"]),
            docstring=Untyped("norm/cuda/_docstring.j2", context),
        ),
    ]


def _context(plan: NormPlan) -> dict[str, object]:
    """Every name of the templates."""
    spec, kernels = plan.spec, KernelFields(plan)
    forward = kernels.forward()
    backward = kernels.backward() if plan.backward else None
    dtypes = {o.dtype for o in plan.operands} | set(spec.dtypes.values())
    return {
        "name": spec.name,
        "summary": opening(spec, in_comment=True),
        "formula": formula(plan),
        "heads_words": ["rows of different heads one after the other"] if spec.heads else [],
        "elements": used(
            dtypes,
            rounds=True,
            rounded=kernels.rounds,
            stores_fp32="fp32" in dtypes or bool(backward and backward["sums"]),
        ),
        "moments": plan.layer,
        "passes_words": ["mean and variance in two passes"] if plan.layer else [],
        "sums_of_rows": SUMS[spec.norm],
        "multiples": kernels.multiples,
        "multiple_name": ["multiple"] if kernels.multiples else [],
        "apart_words": ["rows of one thread a multiple of `multiple` apart"] * kernels.multiples,
        "multiple_param": ["long long multiple"] if kernels.multiples else [],
        "constants": kernels.constants,
        "forward": forward,
        "backward": backward,
        "helpers": in_order(kernels.printer.helpers),
        "row_gradients": bool(backward and backward["row_sums"]),
        "vector": kernels.vector,
        "quantized": spec.quantize is not None,
        "per_row": bool(spec.quantize and spec.quantize.scale == "per_row"),
        "per_tensor": bool(spec.quantize and spec.quantize.scale == "per_tensor"),
        "least_capability": 89 if spec.quantize else 80,
        "loader": Loader(spec.name, 8, 9 if spec.quantize else 0, dynamic_shared=True),
        **LauncherFields(kernels, forward, backward).fields(),
    }
