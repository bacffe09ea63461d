"""A norm on plain PyTorch, from the original expression trees.

`exact` computes the truth in float64. `eager` computes as eager PyTorch in the kernel's dtypes, for
comparison of errors. Gradients come from autograd, not from symbolic derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kgen.kernels.norm.verify.problem import Problem
from kgen.verify.evaluate import evaluate
from kgen.verify.tensors import DTYPES

FP8_MAX = 448.0
TINY = 2.0**-110
"""Lower bound of the magnitude of a row, so that its scale and the inverse are normal numbers."""


@dataclass(frozen=True)
class Result:
    """Results of a norm.

    `outputs` by name: `out`, `scale` [..., 1], `h`. `grads` by the name of the operand. `natural`
    has the row norms of each without cancellation. Rounding errors are relative to them if
    `h - mean` cancels.
    """

    outputs: dict[str, Tensor]
    grads: dict[str, Tensor] = field(default_factory=dict)
    natural: dict[str, Tensor] = field(default_factory=dict)


def exact(problem: Problem, tensors: Mapping[str, Tensor], **options: Any) -> Result:
    """Compute in float64 without rounding. The arguments are those of `_norm`."""
    return _norm(problem, tensors, torch.float64, **options)


def eager(problem: Problem, tensors: Mapping[str, Tensor], **options: Any) -> Result:
    """Compute in fp32, rounded as in the spec and to stored dtypes.

    The arguments are those of `_norm`.
    """
    return _norm(problem, tensors, torch.float32, **options)


def _norm(
    problem: Problem,
    tensors: Mapping[str, Tensor],
    real: Any,
    *,
    eps: float,
    params: Mapping[str, int | float],
    scale: Tensor | None = None,
    cotangents: Mapping[str, Tensor] | None = None,
) -> Result:
    """Return the outputs for `tensors` (operands by name), and with `cotangents` (by output) the
    gradients.

    x [..., D] or [..., H, D]; rows [...], columns [D] or [H, D]; of any dtype and strides.
    """
    rounds = real == torch.float32
    learned = [o.name for o in problem.operands if o.grad] if cotangents else []
    leaves = {
        n: t.detach().to(real).requires_grad_(n in learned) if t.is_floating_point() else t
        for n, t in tensors.items()
    }
    rows = {o.name for o in problem.operands if o.along == "row"}
    env: dict[str, Any] = {n: t[..., None] if n in rows else t for n, t in leaves.items()}
    env |= {**params, "inf": torch.inf}

    def value(field: str, default: Any, **more: Any) -> Any:
        tree = getattr(problem, field)
        return (
            default
            if tree is None
            else evaluate(tree, env | more, torch, real).expand_as(leaves["x"])
        )

    made = _forward(problem, leaves, value, eps, real)
    h, y = made.h, made.y
    out = value("output_mod", y, y=y)

    outputs = _stored(problem, out, h, scale, real)
    result = Result({n: t.detach() for n, t in outputs.items()})
    if not rounds:
        loud = value("output_mod", made.tall, y=made.tall).detach()
        result.natural.update(out=loud.abs().norm(dim=-1), h=h.detach().norm(dim=-1))
    if not cotangents:
        return result
    pairs = [(outputs[n], c.to(outputs[n].dtype)) for n, c in cotangents.items()]
    wanted = {n: leaves[n] for n in learned}
    grads = torch.autograd.grad(
        [o for o, _ in pairs],
        [*wanted.values(), h, y],
        [c for _, c in pairs],
        True,
        materialize_grads=True,
    )
    for (name, _), grad in zip(wanted.items(), grads, strict=False):
        dtype = next(o.dtype for o in problem.operands if o.name == name)
        result.grads[name] = grad.to(DTYPES[dtype]) if rounds else grad
    if not rounds:
        wide = {n: c.to(real) for n, c in cotangents.items()}
        result.natural.update(_natural(problem, wanted, made, value, grads[-1], wide))
    return result


Value = Callable[..., Any]
"""Function that returns the value of an expression of the spec by its field, or a default."""


@dataclass(frozen=True)
class _Forward:
    """Values of a norm between its operands and `output_mod`."""

    h: Tensor
    mean: Tensor
    rstd: Tensor
    factor: Tensor
    bias: Tensor
    y: Tensor

    @property
    def sizes(self) -> Tensor:
        """The normalized rows without cancellation between `h` and the mean."""
        return (self.h.abs() + self.mean.abs()).detach() * self.rstd.detach()

    @property
    def tall(self) -> Tensor:
        """`y` without cancellation."""
        return (self.sizes * self.factor.abs() + self.bias.abs()).detach()


def _forward(
    problem: Problem, leaves: Mapping[str, Tensor], value: Value, eps: float, real: Any
) -> _Forward:
    def rounded(t: Tensor, dtype: str) -> Tensor:
        return t.to(DTYPES[dtype]).to(real) if real == torch.float32 else t

    h = value(
        "input_mod", leaves["x"] + leaves["residual"] if problem.residual else leaves["x"] * 1
    )
    if problem.residual == "in_out":
        h = rounded(h, problem.dtypes["residual"])
    mean = h.mean(-1, keepdim=True) if problem.norm == "layer" else torch.zeros_like(h[..., :1])
    rstd = torch.rsqrt((h - mean).square().mean(-1, keepdim=True) + eps)
    x_hat = (h - mean) * rstd
    factor = (
        leaves["weight"] + problem.weight_offset
        if "weight" in leaves
        else torch.ones((), dtype=real)
    )
    factor, bias = (
        factor.to(h.device),
        leaves.get("bias", torch.zeros((), dtype=real, device=h.device)),
    )
    y = (rounded(x_hat, problem.dtypes["input"]) if problem.round_x_hat else x_hat) * factor + bias
    return _Forward(h, mean, rstd, factor, bias, y)


def _stored(
    problem: Problem, out: Tensor, h: Tensor, scale: Tensor | None, real: Any
) -> dict[str, Tensor]:
    """Return the outputs as stored. In float64, nothing is rounded."""
    found = {}
    if problem.quantize:
        if problem.quantize == "per_row":
            found["scale"] = out.abs().amax(-1, keepdim=True).clamp_min(TINY) / FP8_MAX
        step = found.get("scale", scale)
        assert step is not None
        found["out"] = (out / step.to(real)).clamp(-FP8_MAX, FP8_MAX)
    else:
        found["out"] = out
    if problem.residual == "in_out":
        found["h"] = h
    if real == torch.float64:
        return found
    dtypes = {"out": problem.dtypes["output"], "h": problem.dtypes["residual"], "scale": "fp32"}
    return {n: t.to(DTYPES[dtypes[n]]) for n, t in found.items()}


def _natural(
    problem: Problem,
    wanted: Mapping[str, Tensor],
    made: _Forward,
    value: Value,
    dy: Tensor,
    cotangents: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the row norms of gradients without cancellation, by the names of `Result.natural`
    (`dx`).
    """
    h, sizes, tall = made.h, made.sizes, made.tall
    dx_hat = (dy * made.factor).detach().abs()
    means = (dx_hat * sizes).mean(-1, keepdim=True), dx_hat.mean(-1, keepdim=True)
    dh = (dx_hat + sizes * means[0] + means[1]) * made.rstd.detach()
    if "h" in cotangents:
        dh = dh + cotangents["h"].abs()
    dy, dout = dy.abs(), cotangents["out"]
    inputs = [t for n, t in wanted.items() if n not in ("weight", "bias")]
    before = torch.autograd.grad(h, inputs, dh, True, allow_unused=True)
    after: Any = [None] * len(inputs)
    if problem.output_mod is not None:
        loud = value("output_mod", tall, y=tall)
        if loud.requires_grad:
            after = torch.autograd.grad(loud, inputs, dout.abs(), allow_unused=True)
    found = {}
    sums = iter(zip(before, after, strict=True))
    for name, leaf in wanted.items():
        if name in ("weight", "bias"):
            terms = dy * sizes if name == "weight" else dy
            total = terms.sum_to_size(leaf.shape)
        else:
            parts = [part.abs() for part in next(sums) if part is not None]
            total = sum(parts, torch.zeros_like(leaf))
        found[f"d{name}"] = total.detach().norm(dim=-1)
    return found
