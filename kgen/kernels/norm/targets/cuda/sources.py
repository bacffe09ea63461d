"""The CUDA target of norms: a plan becomes the names that `templates/norm/cuda/norm.cu.j2` and `norm.py.j2` use."""

from __future__ import annotations

from kgen.expr.functions import in_order
from kgen.expr.show import show
from kgen.kernels.norm.plan.planning import NormPlan, plan_norm
from kgen.kernels.norm.targets.cuda.kernels import KernelFields
from kgen.kernels.norm.targets.cuda.launcher import LauncherFields
from kgen.spec.load import Loaded
from kgen.targets import Source, opening
from kgen.targets.cuda.elements import used


def sources(loaded: Loaded) -> list[Source]:
    """`cuda.cu` with the kernels, `cuda.py` with the operators."""
    context = _context(plan_norm(loaded))
    return [
        Source("cuda.cu", "norm/cuda/norm.cu.j2", context, comment="//"),
        Source("cuda.py", "norm/cuda/norm.py.j2", context, rank=2, needs="cuda.core"),
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
        "formula": _formula(plan),
        "heads_words": ", rows of different heads one after the other" if spec.heads else "",
        "elements": used(dtypes),
        "rounds": True,
        "moments": plan.layer,
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
        "least_major_minor": "8, 9" if spec.quantize else "8, 0",
        "least_words": "8.9" if spec.quantize else "8.0",
        "dynamic_shared": True,
        "shared_argument": "shared",
        "config_arguments": "grid, block, shared, cluster",
        "launch_config": "grid=grid, cluster=cluster if cluster > 1 else None, block=block, shmem_size=shared",
        **LauncherFields(kernels, forward, backward).fields(),
    }


def _formula(plan: NormPlan) -> list[str]:
    spec = plan.spec
    y = (
        "x_hat"
        + (f" * ({'1 + ' if spec.weight_offset else ''}weight)" if spec.weight else "")
        + (" + bias" if spec.bias else "")
    )
    centred = "(h - mean(h)) / sqrt(var(h) + eps)" if plan.layer else "h / sqrt(mean(h * h) + eps)"
    lines = [f"h = {show(plan.forward.h.tree)}", f"x_hat = {centred}", f"y = {y}"]
    return [*lines, f"out = {show(plan.forward.out.tree)}"]
