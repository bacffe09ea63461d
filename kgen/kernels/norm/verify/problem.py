"""Properties of a norm's spec for verification and benchmarks, as plain frozen data.

A `Problem` is pickled for worker processes. It does not depend on the model of the spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kgen.expr.nodes import Node
from kgen.kernels.norm.plan.planning import plan_norm


@dataclass(frozen=True)
class Operand:
    """A tensor argument.

    `along` is `element` (shaped as x), `row` (x without its last dimension) or `column`.
    """

    name: str
    dtype: str
    along: str
    grad: bool


@dataclass(frozen=True)
class Param:
    """A scalar: a compile-time constant with a `value`, or a run-time argument."""

    name: str
    type: str
    value: int | float | None = None


@dataclass(frozen=True)
class Problem:
    """A norm, with its expression trees as written."""

    name: str
    norm: str
    widths: tuple[int, ...]
    """Allowed widths. Empty for any width."""
    heads: int | str | None
    dtypes: Mapping[str, str]
    weight_offset: int
    eps: float
    operands: tuple[Operand, ...]
    """The existing operands of x, residual, weight, bias, then the buffers."""
    params: tuple[Param, ...] = ()
    residual: str | None = None
    round_x_hat: bool = False
    quantize: str | None = None
    passes: tuple[str, ...] = ("forward", "backward")
    fast_math: bool = False
    input_mod: Node | None = None
    output_mod: Node | None = None
    kernel: ClassVar[str] = "norm"
    part: ClassVar[str | None] = None

    def __contains__(self, operand: str) -> bool:
        return any(o.name == operand for o in self.operands)

    @property
    def runtime_params(self) -> tuple[Param, ...]:
        """The keyword parameters of the emitted function."""
        return tuple(p for p in self.params if p.value is None)

    @property
    def least_capability(self) -> int:
        """The least compute capability of the emitted kernels: 8.9 has 8-bit floats."""
        return 89 if self.quantize else 0

    @property
    def positional(self) -> tuple[str, ...]:
        """The positional arguments of the emitted function."""
        return tuple(n for n in ("x", "weight", "bias") if n in self)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs of the emitted function, in order."""
        scale = ("scale",) if self.quantize == "per_row" else ()
        return ("out", *scale, *(("h",) if self.residual == "in_out" else ()))


def problem_of(loaded: Any) -> Problem:
    """Return the `Problem` of a `kgen.spec.load.Loaded`."""
    spec = loaded.spec
    widths = (
        () if spec.width == "any" else (spec.width,) if isinstance(spec.width, int) else spec.width
    )
    return Problem(
        name=spec.name,
        norm=spec.norm,
        widths=tuple(widths),
        heads=spec.heads,
        dtypes=dict(spec.dtypes),
        weight_offset=spec.weight_offset,
        eps=spec.eps,
        operands=tuple(
            Operand(o.name, o.dtype, o.along, o.grad) for o in plan_norm(loaded).operands
        ),
        params=tuple(
            Param(n, p.type, None if p.runtime else p.value) for n, p in spec.params.items()
        ),
        residual=spec.residual,
        round_x_hat=spec.round_x_hat,
        quantize=spec.quantize.scale if spec.quantize else None,
        passes=tuple(spec.passes),
        fast_math=spec.fast_math,
        input_mod=loaded.trees.get("input_mod"),
        output_mod=loaded.trees.get("output_mod"),
    )
