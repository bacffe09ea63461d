"""The parts of the portable kernels and their launcher that the kernels for Hopper use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kgen.kernels.attention.lowered.model import LoopKernel
from kgen.kernels.attention.targets.triton.placement import Sizes
from kgen.targets.code import Code


@dataclass(frozen=True)
class Portable:
    """The loops of the kernels for every chip."""

    forward: LoopKernel
    dq: LoopKernel | None = None
    dkdv: LoopKernel | None = None


@dataclass(frozen=True)
class Surroundings:
    """The code by which portable kernels find rows and heads, and their declarations of the
    problem.
    """

    kv_heads: str
    problem_params: list[str]
    no_specialize: str
    vectors: Code
    """The offset of a head's row of log-sum-exp and delta."""
    strides_o: str
    """The strides of a tensor as wide as out, as parameters."""
    sink_load: Code
    dead_rows: str
    """Rows that see no key, in words."""


@dataclass(frozen=True)
class Call:
    """The names by which the launcher has the values of a call."""

    inputs: str
    """Its tensors and numbers."""
    problem_args: str
    sizes: Sizes
    shape_of_lse: str
    group: int
    """Number of heads that are processed at a time."""
    shares: bool
    """True if other functions begin and end backward."""


def portable_of(loops: Mapping[str, LoopKernel]) -> Portable:
    """The loops by the names of their kernels."""
    return Portable(loops["forward"], loops.get("dq"), loops.get("dkdv"))
