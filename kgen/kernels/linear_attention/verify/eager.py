"""The eager computation, whose error is the yardstick of kernels: the chunked form on plain
PyTorch.

The operands and results of matrix products have the dtype of q, as a user would write it. Decays
and states are float32. Feature maps, norms and expressions are computed in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kgen.kernels.linear_attention.verify.problem import Problem
from kgen.kernels.linear_attention.verify.reference import (
    PLAIN,
    STATE,
    Call,
    Result,
    Tokens,
    computed,
    recurrence,
)

_OWN_DTYPE = ("q", "k", "v")


def eager(problem: Problem, inputs: Mapping[str, Tensor], call: Call = PLAIN) -> Result:
    """Compute outputs, and gradients in `call.wanted`, in the dtypes of the inputs."""
    steps = partial(chunked, size=problem.chunk_size)
    return _rounded(computed(problem, _leaves(inputs, call), call, steps, torch.float32), inputs)


def eager_steps(problem: Problem, inputs: Mapping[str, Tensor], call: Call = PLAIN) -> Result:
    """Compute outputs token by token in float32, rounded to the dtypes of the inputs."""
    found = _leaves(inputs, call)
    wide = {name: x.float() for name, x in found.items()}
    result = computed(problem, wide, call, recurrence, torch.float32)
    dtype = inputs[STATE].dtype if STATE in inputs else torch.float32
    o, final = result.o.to(inputs["v"].dtype), result.final_state.to(dtype)
    return Result(o, final, states=result.states)


def _leaves(inputs: Mapping[str, Tensor], call: Call) -> dict[str, Tensor]:
    kept = {name: x.detach() for name, x in inputs.items()}
    wide = {n: x if n in (*_OWN_DTYPE, STATE) else x.float() for n, x in kept.items()}
    return {n: x.clone().requires_grad_(n in call.wanted) for n, x in wide.items()}


def _rounded(result: Result, inputs: Mapping[str, Tensor]) -> Result:
    grads = {name: x.to(inputs[name].dtype) for name, x in result.grads.items()}
    return replace(result, grads=grads, unrounded=result.grads)


def chunked(one: Tokens, size: int) -> tuple[Tensor, Tensor]:
    """Step the state chunk by chunk, and return the output and the last state."""
    state, outputs = one.state, [one.v[:0]]
    for begin in range(0, one.length, size):
        rows = slice(begin, begin + size)
        o, state = _chunk(one, rows, state)
        outputs.append(o.transpose(0, 1))
        one.record(min(begin + size, one.length), state)
    return torch.cat(outputs), state


def _chunk(one: Tokens, rows: slice, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of one chunk, [HV, C, V], and the state after it."""
    q, k, v = (x[rows].transpose(0, 1) for x in (one.q, one.k, one.v))
    dtype, beta = v.dtype, None if one.beta is None else one.beta[rows].transpose(0, 1)
    total = None if one.decay is None else one.decay[rows].transpose(0, 1).cumsum(1)

    def scaled(x: Tensor, factor: Tensor | None) -> Tensor:
        return x if factor is None else (factor * x).to(dtype)

    since = None if total is None else total.exp()
    until = None if total is None else (total[:, -1:] - total).exp()
    new = scaled(v, beta)
    if one.delta:
        lower = _products(k, k, total, strict=True)
        lower = lower if beta is None else beta * lower
        eye = torch.eye(lower.shape[-1], device=lower.device)
        solved = torch.linalg.solve_triangular(lower + eye, eye.expand_as(lower), upper=False)
        solved = solved.to(dtype)
        keys = solved @ scaled(scaled(k, since), beta)
        new = (solved @ new).float() - (keys @ state.to(dtype)).float()
        new = new.to(dtype)
    pairs = _products(q, k, total, strict=False)
    o = (scaled(q, since) @ state.to(dtype)).float() + (pairs.to(dtype) @ new).float()
    added = (scaled(k, until).mT @ new).float()
    kept = state if total is None else _Kept.apply(total[:, -1, :, None].exp(), state, dtype)
    return (one.scale * o).to(dtype), kept + added


class _Kept(torch.autograd.Function):  # type: ignore[misc]
    """The state after the decay of a chunk.

    The gradient of the decay is a sum of products of the state and its gradient. Chunked kernels
    read both from memory in the dtype of q. In float32, this term would have no error at all.
    """

    @staticmethod
    def forward(ctx: Any, decay: Tensor, state: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the product."""
        ctx.save_for_backward(decay, state.to(dtype))
        return decay * state

    @staticmethod
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of the decay and of the state."""
        decay, low = ctx.saved_tensors
        products = low.float() * change.to(low.dtype).float()
        return products.sum_to_size(decay.shape), decay * change, None


def _products(a: Tensor, b: Tensor, total: Tensor | None, *, strict: bool) -> Tensor:
    """Return the products of rows of a and b with the decay between them, [HV, C, C], float32."""
    i = torch.arange(a.shape[1], device=a.device)
    pair = i[:, None] > i if strict else i[:, None] >= i
    if total is None:
        return torch.where(pair, (a @ b.mT).float(), 0)
    between = total[:, :, None] - total[:, None]
    between = torch.where(pair[..., None], between, -torch.inf)
    if total.shape[-1] == 1:
        return (a @ b.mT).float() * between[..., 0].exp()
    # Both factors are rounded, as operands of a product.
    half = (0.5 * between).exp()
    left, right = (half * a[:, :, None]).to(a.dtype), (half * b[:, None]).to(a.dtype)
    return (left.float() * right.float()).sum(-1)
