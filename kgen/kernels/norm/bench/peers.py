"""The peers of a norm: libraries, and the formula in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kgen.bench.peers import CUDNN, LIGER, QUACK, DoesNotApply
from kgen.kernels.norm.verify.problem import Problem
from kgen.verify.evaluate import evaluate
from kgen.verify.tensors import DTYPES

HEADS = 32
Norm = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Workload:
    """The operands by name, the gradients of the outputs by name, and the parameters of one
    benchmark.
    """

    problem: Problem
    operands: Mapping[str, Tensor]
    cotangents: Mapping[str, Tensor]
    params: Mapping[str, int | float]
    scale: Tensor | None

    @property
    def wanted(self) -> list[Tensor]:
        """The operands whose gradients are computed."""
        return [self.operands[o.name] for o in self.problem.operands if o.grad]

    def bytes_moved(self, pass_: str) -> int:
        """Return the bytes that a pass reads and writes at least.

        Weights, statistics and other small tensors are not counted.
        """
        problem, x = self.problem, self.operands["x"]
        sizes: dict[str, int] = {
            o.name: self.operands[o.name].nbytes for o in problem.operands if o.along == "element"
        }
        residual = sizes.pop("residual", 0)
        h: int = (
            x.numel() * DTYPES[problem.dtypes["residual"]].itemsize
            if problem.residual == "in_out"
            else 0
        )
        out: int = x.numel() * DTYPES[problem.dtypes["output"]].itemsize
        if pass_ == "forward":
            return sum(sizes.values()) + residual + h + out
        learned = sum(sizes[o.name] for o in problem.operands if o.grad and o.name in sizes)
        # The residual has the gradient of x. The stored sum h is read instead of x and the
        # residual.
        read = 2 * h + sum(sizes.values()) - sizes["x"] if h else residual + sum(sizes.values())
        return int(read + out + learned + (residual if residual not in (0, x.nbytes) else 0))


def draw_workload(problem: Problem, rows: int, width: int, device: str) -> Workload:
    """Create a workload with N(0, 1) floating-point operands."""
    torch.manual_seed(0)
    heads = (
        () if problem.heads is None else (HEADS if problem.heads == "any" else int(problem.heads),)
    )
    shape = (rows // heads[0], *heads, width) if heads else (rows, width)
    shapes = {"element": shape, "row": shape[:-1], "column": (*heads, width)}

    def drawn(size: tuple[int, ...], dtype: str) -> Tensor:
        kind = DTYPES[dtype]
        if not kind.is_floating_point:
            return torch.ones(size, dtype=kind, device=device)
        return torch.randn(size, device=device, dtype=kind)

    operands = {o.name: drawn(shapes[o.along], o.dtype) for o in problem.operands}
    dtypes = {"out": problem.dtypes["output"], "h": problem.dtypes["residual"]}
    backward = "backward" in problem.passes
    cotangents = {n: drawn(shape, dtypes[n]) for n in problem.outputs} if backward else {}
    params = {p.name: 1 if p.value is None else p.value for p in problem.params}
    scale = torch.ones((), device=device) if problem.quantize == "per_tensor" else None
    return Workload(problem, operands, cotangents, params, scale)


def prepare(name: str, workload: Workload, functions: Mapping[str, Any]) -> Norm:
    """Return a peer by name; `functions` are the emitted ones. Raise `DoesNotApply` if it cannot
    compute the spec."""
    problem, operands = workload.problem, workload.operands
    if name in functions:
        by_name = dict(operands)
        args = [by_name.pop(n) for n in problem.positional]
        by_name |= {p.name: workload.params[p.name] for p in problem.runtime_params}
        scale = {} if workload.scale is None else {"scale": workload.scale}
        function = functions[name]
        return lambda: _several(function(*args, **by_name, **scale, eps=problem.eps))
    if name in ("eager", "compile"):
        formula = (lambda: _formula(workload)) if name == "eager" else None
        compiled = formula or torch.compile(lambda: _formula(workload), dynamic=False)
        return lambda: _several(compiled())
    plain = problem.input_mod is None and problem.output_mod is None and problem.quantize is None
    if not plain or problem.residual or problem.heads is not None or "weight" not in problem:
        raise DoesNotApply
    x, weight, bias = operands["x"], operands["weight"], operands.get("bias")
    libraries: dict[str, Callable[..., Norm]] = {
        "torch": _torch,
        "cudnn": _cudnn,
        "liger": _liger,
        "quack": _quack,
    }
    return libraries[name](problem, x, weight, bias)


def _several(result: Any) -> tuple[Tensor, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _torch(problem: Problem, x: Tensor, weight: Tensor, bias: Tensor | None) -> Norm:
    functional = torch.nn.functional
    if problem.weight_offset:
        raise DoesNotApply
    if problem.norm == "layer":
        return lambda: (functional.layer_norm(x, x.shape[-1:], weight, bias, problem.eps),)
    return lambda: (functional.rms_norm(x, x.shape[-1:], weight, problem.eps),)


def _cudnn(problem: Problem, x: Tensor, weight: Tensor, bias: Tensor | None) -> Norm:
    """Return the norm of cuDNN, by its frontend for Python."""
    layer = problem.norm == "layer"
    dtypes = (x.dtype, torch.float32) if layer else (x.dtype,)
    if problem.weight_offset or weight.dtype not in dtypes:
        raise DoesNotApply
    cudnn = CUDNN.load()
    if layer:
        return lambda: (cudnn.layer_norm(x, x.shape[-1:], weight, bias, problem.eps),)
    return lambda: (cudnn.rms_norm(x, weight, bias, problem.eps),)


def _liger(problem: Problem, x: Tensor, weight: Tensor, bias: Tensor | None) -> Norm:
    if problem.norm == "layer":
        layer = LIGER.load("layer_norm").LigerLayerNormFunction
        return lambda: (layer.apply(x, weight, bias, problem.eps),)
    function = LIGER.load("rms_norm").LigerRMSNormFunction
    mode = "gemma" if problem.weight_offset else "llama"
    return lambda: (
        function.apply(x, weight, problem.eps, float(problem.weight_offset), mode, False),
    )


def _quack(problem: Problem, x: Tensor, weight: Tensor, bias: Tensor | None) -> Norm:
    if problem.weight_offset:
        raise DoesNotApply
    quack = QUACK.load()
    if problem.norm == "rms":
        return lambda: (quack.rmsnorm(x, weight, eps=problem.eps),)

    # quack's layer norm takes fp32 weights, and its two passes are not joined in an autograd
    # function.
    wide = [None if t is None else t.detach().float() for t in (weight, bias)]

    class LayerNorm(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Tensor, *_: Tensor | None) -> Tensor:
            out, *saved = quack.layernorm_fwd(
                x, *wide, problem.eps, return_rstd=True, return_mean=True
            )
            ctx.save_for_backward(x, *saved)
            return out

        @staticmethod
        def backward(ctx: Any, *douts: Tensor) -> Any:
            x, rstd, mean = ctx.saved_tensors
            return quack.layernorm_bwd(x, wide[0], douts[0], rstd, mean, bias is not None)

    return lambda: (LayerNorm.apply(x, weight, bias),)


def _formula(workload: Workload) -> tuple[Tensor, ...]:
    """Return the norm in eager PyTorch: fp32, rounded where tensors are stored."""
    problem, operands = workload.problem, workload.operands
    rows = {o.name for o in problem.operands if o.along == "row"}
    env: dict[str, Any] = {
        n: (t.float() if t.is_floating_point() else t)[..., None] if n in rows else t
        for n, t in operands.items()
    }
    env |= {n: t.float() for n, t in env.items() if t.is_floating_point()} | dict(workload.params)
    h = env["x"] + env["residual"] if problem.residual else env["x"]
    if problem.input_mod is not None:
        h = evaluate(problem.input_mod, env, torch, torch.float32)
    stored = []
    if problem.residual == "in_out":
        stored.append(h.to(DTYPES[problem.dtypes["residual"]]))
        h = stored[0].float()
    centred = h - h.mean(-1, keepdim=True) if problem.norm == "layer" else h
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + problem.eps)
    if problem.round_x_hat:
        y = y.to(operands["x"].dtype).float()
    if "weight" in problem:
        y = y * (env["weight"] + problem.weight_offset)
    y = y + env["bias"] if "bias" in problem else y
    if problem.output_mod is not None:
        y = evaluate(problem.output_mod, env | {"y": y}, torch, torch.float32)
    if problem.quantize:
        step = workload.scale
        if problem.quantize == "per_row":
            step = y.abs().amax(-1, keepdim=True) / 448.0
            stored.insert(0, step)
        y = (y / step).clamp(-448.0, 448.0)
    return (y.to(DTYPES[problem.dtypes["output"]]), *stored)
