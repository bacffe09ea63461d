"""The arguments of a norm: descriptions and checks that the launchers of all targets share."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.expr.nodes import Const, Node, Type, Var, substitute
from kgen.kernels.norm.plan.planning import NormPlan, Operand
from kgen.targets.arguments import (
    NO_BACKWARD,
    NOT_ASKED_FOR,
    NOT_LEARNED,
    Derivatives,
    cast_lines,
    derivatives_of,
    divisor_lines,
)
from kgen.targets.signature import Signature
from kgen.targets.triton.text import TORCH_DTYPES

FP8 = {"fp8_e4m3": "float8_e4m3fn"}
HEADS_WIDTH = 2**14
"""The widest row with heads. One program processes it, because programs do not share rows with
heads.
"""
MEANINGS = {
    "x": "the rows to norm",
    "residual": "added to x before the norm",
    "weight": "multiplies the normed rows",
    "bias": "added to the normed rows",
}


@dataclass(frozen=True)
class Check:
    """A condition for which the function raises, and the message."""

    wrong: str
    message: str
    error: str = "ValueError"


def meaning(operand: Operand) -> str:
    """Describe the use of a tensor, for docstrings."""
    return MEANINGS.get(operand.name, "a buffer of the expressions")


def norm_divisors(plan: NormPlan) -> list[str]:
    """Return the checks of the divisors in both expressions."""
    params = plan.spec.params
    numbers: dict[Node, Node] = {
        Var(n, p.scalar): Const(p.value, p.scalar) for n, p in params.items() if p.value is not None
    }
    trees = [substitute(value.tree, numbers) for value in (plan.forward.h, plan.forward.out)]
    return divisor_lines(plan.spec.name, trees, [n for n, p in params.items() if p.runtime])


def norm_signature(plan: NormPlan) -> Signature:
    """Return the parameters of the function."""
    spec, names = plan.spec, [o.name for o in plan.operands]
    if spec.quantize and spec.quantize.scale == "per_tensor":
        names.append("scale")
    tensors = tuple(n for n in names if n in ("x", "weight", "bias"))
    runtime = (n for n, p in spec.params.items() if p.runtime)
    required = (*(n for n in names if n not in tensors), *runtime)
    return Signature(tensors, required, (("eps", repr(spec.eps)),))


def norm_casts(plan: NormPlan) -> list[str]:
    """Return the lines that cast arguments under autocast."""
    dtypes = {o.name: o.dtype for o in plan.operands if o.type is Type.FLOAT}
    if plan.spec.quantize and plan.spec.quantize.scale == "per_tensor":
        dtypes["scale"] = "fp32"
    return cast_lines({name: f"torch.{TORCH_DTYPES[dtype]}" for name, dtype in dtypes.items()})


def norm_derivatives(plan: NormPlan) -> Derivatives:
    """Return the arguments that have a gradient, and the reason why others have none."""
    spec = plan.spec
    real = {o.name: o.grad for o in plan.operands if o.type is Type.FLOAT}
    if spec.quantize and spec.quantize.scale == "per_tensor":
        real["scale"] = False
    if plan.backward:
        refused = {n: NOT_LEARNED for n, grad in real.items() if not grad}
    else:
        refused = dict.fromkeys(real, NO_BACKWARD if spec.quantize else NOT_ASKED_FOR)
    return derivatives_of(real, refused, derived=plan.backward is not None)
