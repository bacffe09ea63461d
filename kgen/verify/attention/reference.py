"""Attention on plain PyTorch, from the original expression trees.

`attention` computes in float64: the truth. `eager` computes as someone who writes attention in eager PyTorch
in the kernel's dtype would: the yardstick for errors. Both walk the tree that the user wrote, so a wrong
simplification cannot hide, and both take gradients from autograd, never from symbolic derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kgen.expr.nodes import Node
from kgen.verify.evaluate import evaluate


@dataclass(frozen=True)
class Result:
    """What attention gives.

    `out` [B, HQ, SQ, DV]; `lse` [B, HQ, SQ] in natural log, -inf where a row sees no key; `seen`
    [B, HKV, SK], whether any query of the group sees that key; `grads` by name (`q`, `k`, `v` and buffers).
    `natural` has the norms that the rows of each gradient would have if nothing cancelled: where a gradient
    cancels to almost nothing, its rounding errors are relative to that.
    """

    out: Tensor
    lse: Tensor
    seen: Tensor
    grads: dict[str, Tensor] = field(default_factory=dict)
    natural: dict[str, Tensor] = field(default_factory=dict)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: Node | None = None,
    mask_mod: Node | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    params: Mapping[str, int | float] | None = None,
    scale: float | None = None,
    dtype: Any = torch.float64,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    wanted: Sequence[str] = ("q", "k", "v"),
    kv_lens: Tensor | None = None,
    aligned_to_end: bool = False,
) -> Result:
    """Attention and its gradients with everything computed in `dtype`.

    q [B, HQ, SQ, D], k [B, HKV, SK, D], v [B, HKV, SK, DV], of any dtype and strides, HQ a multiple of HKV.
    With `dout` [B, HQ, SQ, DV] (and `dlse` [B, HQ, SQ]) the gradients of the inputs and buffers in `wanted`
    come with it. Rows without a key give zeros, -inf and zero gradients. `kv_lens` [B] says how many keys each
    sequence has; with `aligned_to_end` the last query is at the position of the last of them. One (b, h) slice is in
    memory at a time.
    """
    mods = (score_mod, mask_mod)
    places = (kv_lens, aligned_to_end)
    return _slices(
        q, k, v, mods, buffers or {}, params or {}, scale, dtype, dtype, dout, dlse, wanted, places
    )


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: Node | None = None,
    mask_mod: Node | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    params: Mapping[str, int | float] | None = None,
    scale: float | None = None,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    wanted: Sequence[str] = ("q", "k", "v"),
    kv_lens: Tensor | None = None,
    aligned_to_end: bool = False,
    tf32: bool = False,
) -> Result:
    """The same in the inputs' dtype: matmuls in it, modifications and softmax in fp32, P rounded.

    With `tf32`, matmuls of fp32 round their operands as PyTorch does on a GPU where TF32 is allowed.
    Gradients are accumulated over slices in fp32 and rounded once to the dtype of their input.
    """
    mods = (score_mod, mask_mod)
    places = (kv_lens, aligned_to_end)
    product = _tf32_matmul if tf32 else torch.matmul
    real = torch.float32
    return _slices(
        q, k, v, mods, buffers or {}, params or {}, scale, real, q.dtype, dout, dlse, wanted, places, product
    )


def to_tf32(x: Tensor) -> Tensor:
    """float32 rounded to the nearest number with ten bits of mantissa, ties away from zero."""
    rounded = ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


class _Tf32Matmul(torch.autograd.Function):  # type: ignore[misc]
    """Products of two matrices, forward and backward, whose operands are rounded to TF32; sums are fp32."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        a, b = to_tf32(a), to_tf32(b)
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        grad = to_tf32(grad)
        return grad @ b.mT, a.mT @ grad


def _tf32_matmul(a: Tensor, b: Tensor) -> Tensor:
    product: Tensor = _Tf32Matmul.apply(a, b)
    return product


def _slices(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mods: tuple[Node | None, Node | None],
    buffers: Mapping[str, Tensor],
    params: Mapping[str, int | float],
    scale: float | None,
    real: Any,
    store: Any,
    dout: Tensor | None,
    dlse: Tensor | None,
    wanted: Sequence[str],
    places: tuple[Tensor | None, bool],
    product: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> Result:
    batch, heads, sq, dim = q.shape
    heads_kv, sk, dim_v = k.shape[1], k.shape[2], v.shape[3]
    group = heads // heads_kv
    scale = dim**-0.5 if scale is None else scale
    exact = store == torch.float64
    device = q.device
    result = Result(
        out=torch.zeros(batch, heads, sq, dim_v, dtype=store, device=device),
        lse=torch.full((batch, heads, sq), -torch.inf, dtype=real, device=device),
        seen=torch.zeros(batch, heads_kv, sk, dtype=torch.bool, device=device),
    )
    differentiate = dout is not None
    env: dict[str, Any] = {"B": batch, "HQ": heads, "HKV": heads_kv, "SQ": sq, "SK": sk, "inf": torch.inf}
    env |= dict(params)
    env |= {name: value.detach() for name, value in buffers.items()}
    leaves = {}
    for name in (n for n in wanted if differentiate and n in buffers):
        leaves[name] = env[name] = buffers[name].detach().to(real).requires_grad_()
    inputs = {"q": q, "k": k, "v": v}
    sums = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    sums |= {
        n: torch.zeros(inputs[n].shape, dtype=real, device=device)
        for n in wanted
        if differentiate and n in inputs
    }
    natural = {name: torch.zeros_like(total) for name, total in sums.items() if name != "v"}

    lens, aligned_to_end = [sk] * batch if places[0] is None else places[0].tolist(), places[1]
    for b in range(batch):
        first = lens[b] - sq if aligned_to_end else 0
        for h in range(heads):
            at = {"q": (b, h), "k": (b, h // group), "v": (b, h // group)}
            here = {n: t[at[n]].detach().to(store).requires_grad_(differentiate) for n, t in inputs.items()}
            scores = product(here["q"], here["k"].mT).to(real) * scale
            modded = _modified(scores, mods, env | {"b": b, "h": h}, real, first, lens[b])
            p, lse = _softmax(modded)
            out = product(p.to(store), here["v"])
            result.out[b, h] = out.detach()
            result.lse[b, h] = lse.detach()
            result.seen[at["k"]] |= (sk > 0) & (modded.detach() > -torch.inf).any(0)
            if dout is None:
                continue
            cotangents = [
                dout[b, h].to(store),
                torch.zeros_like(lse) if dlse is None else dlse[b, h].to(real),
            ]
            sources = {n: here[n] if n in here else leaves[n] for n in sums}
            if exact and modded.requires_grad:
                uncancelled = _uncancelled(p.detach(), here["v"].detach(), *cotangents)
                _accumulate(natural, at, {n: sources[n] for n in natural}, [modded], [uncancelled])
            _accumulate(sums, at, sources, [out, lse], cotangents)

    rows = {name: total.norm(dim=-1) if total.ndim else total.abs() for name, total in natural.items()}
    result.natural.update(rows)
    for name, total in sums.items():
        result.grads[name] = total if exact else total.to((inputs | dict(buffers))[name].dtype)
    return result


def _modified(
    scores: Tensor,
    mods: tuple[Node | None, Node | None],
    env: dict[str, Any],
    real: Any,
    first: int,
    length: int,
) -> Tensor:
    """The scores [SQ, SK] after both modifications, -inf where masked; query 0 is at position `first`."""
    score_mod, mask_mod = mods
    sq, sk = scores.shape
    env = env | {
        "q_idx": first + torch.arange(sq, device=scores.device)[:, None],
        "kv_idx": torch.arange(sk, device=scores.device)[None, :],
    }
    if mask_mod is None and length == sk:
        if score_mod is not None:
            scores = evaluate(score_mod, env | {"score": scores}, torch, real).expand(sq, sk)
        return scores
    mask = (env["kv_idx"] < length).expand(sq, sk)
    if mask_mod is not None:
        mask = mask & evaluate(mask_mod, env, torch, real)
    if score_mod is None:
        return scores.masked_fill(~mask, -torch.inf)
    # Only what the mask shows is evaluated at all: an infinite derivative at a hidden place would otherwise
    # turn into NaN when autograd multiplies it by zero.
    q_idx, kv_idx = mask.nonzero(as_tuple=True)
    env |= {"q_idx": first + q_idx, "kv_idx": kv_idx, "score": scores[mask]}
    hidden = scores.masked_fill(~mask, -torch.inf)
    if not len(q_idx):
        return hidden
    return hidden.masked_scatter(mask, evaluate(score_mod, env, torch, real).expand(q_idx.shape))


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last dimension and its log-sum-exp; zeros and -inf for rows of -inf."""
    if scores.shape[1] == 0:
        return scores, scores.sum(1) - torch.inf
    peak = scores.detach().amax(1, keepdim=True)
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    p = torch.exp(scores - peak)
    total = p.sum(1, keepdim=True)
    dead = total == 0
    total = torch.where(dead, 1.0, total)
    return p / total, torch.where(dead, -torch.inf, peak + total.log()).squeeze(1)


def _uncancelled(p: Tensor, v: Tensor, dout: Tensor, dlse: Tensor) -> Tensor:
    """The gradient of the scores if the terms of `p * (dp - delta + dlse)` all added up, [SQ, SK]."""
    dp = dout @ v.mT
    delta = (p * dp).sum(1, keepdim=True)
    return p * (dp.abs() + delta.abs() + dlse.abs()[:, None])


def _accumulate(
    sums: dict[str, Tensor],
    at: Mapping[str, tuple[int, int]],
    sources: Mapping[str, Tensor],
    outputs: list[Tensor],
    cotangents: list[Tensor],
) -> None:
    """Add the gradients of one slice to the sums of the whole."""
    grads = torch.autograd.grad(
        outputs, list(sources.values()), cotangents, retain_graph=True, allow_unused=True
    )
    for name, grad in zip(sources, grads, strict=True):
        if grad is not None:
            target = sums[name][at[name]] if name in at else sums[name]
            target += grad.to(target.dtype)
