"""The emitted function of chunk_output, the same for all targets: tensors, signature, casts and
formula.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.expr.unparse import show
from kgen.kernels.chunk_output.plan.planning import ChunkOutputPlan
from kgen.kernels.chunk_output.spec import ChunkOutputSpec
from kgen.targets.arguments import cast_lines
from kgen.targets.signature import Signature
from kgen.targets.triton.text import TORCH_DTYPES


@dataclass(frozen=True)
class Formula:
    """The factors of the formula `o[i] = scale * (q[i] @ state + sum over j of (q[i] . k[j]) *
    v[j])`.

    All of them are None without decay.
    """

    before: str | None
    """The decay since the start of the chunk."""
    between: str | None
    """The decay between two tokens."""
    exponent: str | None
    """The exponent c(i) as the user wrote it."""


def formula(plan: ChunkOutputPlan) -> Formula:
    """Return the factors of the formula of a plan."""
    if plan.decay is None:
        return Formula(None, None, None)
    power = "exp({})" if plan.natural else "2**({})"
    return Formula(power.format("c(i)"), power.format("c(i) - c(j)"), show(plan.decay))


def inputs(plan: ChunkOutputPlan) -> list[str]:
    """Return the floating-point tensors of a call, in order."""
    return ["q", "k", "v", "h", *plan.gates]


def packing(spec: ChunkOutputSpec) -> list[str]:
    """Return the integer tensors of a call, in order."""
    return ["cu_seqlens", "chunk_indices"] if spec.varlen else []


def signature(plan: ChunkOutputPlan) -> Signature:
    """Return the parameters of the function."""
    tensors, scale = tuple(inputs(plan)), ("scale", "None")
    if plan.spec.varlen:
        return Signature(tensors, ("cu_seqlens",), (("chunk_indices", "None"), scale))
    return Signature(tensors, (), (scale,))


def casts(plan: ChunkOutputPlan) -> list[str]:
    """Return the lines that cast arguments under autocast."""
    spec = plan.spec
    dtypes = dict.fromkeys(("q", "k", "v"), spec.dtype) | {"h": spec.state}
    dtypes |= dict.fromkeys(plan.gates, spec.gate_dtype)
    return cast_lines({name: f"torch.{TORCH_DTYPES[dtype]}" for name, dtype in dtypes.items()})
