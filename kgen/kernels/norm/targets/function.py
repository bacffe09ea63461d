"""The parts of the spec's function and operators that are the same in Triton and CUDA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kgen.kernels.norm.plan.planning import NormPlan
from kgen.kernels.norm.targets.arguments import (
    norm_casts,
    norm_derivatives,
    norm_divisors,
    norm_signature,
)
from kgen.spec.common import ParamSpec
from kgen.targets import opening
from kgen.targets.arguments import Derivatives, Numbers, dense, numbers_of


@dataclass(frozen=True)
class NormDocstring:
    """The docstring of the spec's function, as far as it is the same."""

    eps: str
    variance: str
    """The number to which eps is added, in words."""
    derivatives: Derivatives


@dataclass(frozen=True)
class NormFunction:
    """The spec's function, as far as it is the same."""

    name: str
    summary: str
    signature: str
    dense_check: str
    casts: tuple[str, ...]
    x_dims: int
    numbers: Numbers
    derivatives: Derivatives


def norm_docstring(plan: NormPlan) -> NormDocstring:
    """Return the common parts of the docstring of a plan's function."""
    words = "variance" if plan.layer else "mean of squares"
    return NormDocstring(repr(plan.spec.eps), words, norm_derivatives(plan))


def norm_function(
    plan: NormPlan, tensors: Sequence[str], runtime: Mapping[str, ParamSpec]
) -> NormFunction:
    """Return the common parts of a plan's function. `tensors` are its tensor arguments."""
    name = plan.spec.name
    return NormFunction(
        name=name,
        summary=opening(plan.spec),
        signature=str(norm_signature(plan)),
        dense_check=dense(name, tensors),
        casts=tuple(norm_casts(plan)),
        x_dims=2 if plan.spec.heads else 1,
        numbers=numbers_of(name, runtime, divisors=norm_divisors(plan)),
        derivatives=norm_derivatives(plan),
    )
