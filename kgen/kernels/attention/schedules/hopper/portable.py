"""Parts of the portable kernels and their launcher that the Hopper kernels use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kgen.kernels.attention.lowered.model import LoopKernel
from kgen.targets.code import Code


@dataclass(frozen=True)
class Portable:
    """The portable loops, from which the Hopper loops are built."""

    forward: LoopKernel
    dq: LoopKernel | None = None
    dkdv: LoopKernel | None = None


@dataclass(frozen=True)
class Surroundings:
    """The expressions by which portable kernels address rows and heads, and the problem
    parameters.
    """

    kv_heads: str
    problem_params: list[str]
    no_specialize: str
    vectors: Code
    """The offset of a head's row of log-sum-exp and delta."""
    strides_of_dq: str
    """The strides of dq, as parameters."""
    sink_load: Code
    dead_rows: str
    """The results of rows without a visible key, in words."""


@dataclass(frozen=True)
class Call:
    """The launcher's names for the values of a call."""

    inputs: str
    """The tensors and numbers of the call."""
    problem_args: str
    sizes_of_q: str
    """The statement that assigns the sizes of q."""
    other_sizes: list[str]
    shape_of_lse: str
    group: int
    """Number of heads that are processed at a time."""
    shares: bool
    """True if other functions start and finish the backward pass."""


def portable_of(loops: Mapping[str, LoopKernel]) -> Portable:
    """Return the portable loops, by the names of their kernels."""
    return Portable(loops["forward"], loops.get("dq"), loops.get("dkdv"))
