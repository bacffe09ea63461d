"""Attention on plain PyTorch, from the original expression trees.

`attention` computes the truth in float64. `eager` computes as eager PyTorch in the kernel's dtype, for comparison of
errors. Both evaluate the trees as written, so a wrong simplification cannot hide. Both use gradients of autograd, not
symbolic derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kgen.expr.nodes import Node
from kgen.verify.evaluate import evaluate

CuSeqlens = tuple[Sequence[int], Sequence[int]]
Place = tuple[int | slice, int]


@dataclass(frozen=True)
class Result:
    """Results of attention.

    `out` [B, HQ, SQ, DV].
    `lse` [B, HQ, SQ], natural log; -inf for rows without keys and sinks.
    `dead` [B, HQ, SQ], true for rows without keys.
    `seen` [B, HKV, SK], true for keys that any query of the group sees.
    `grads` by name (`q`, `k`, `v` and buffers).
    `natural`: norms of the rows of each gradient without cancellation. Rounding errors are relative to them.
    `rounding`: change of each gradient, as a whole, for a relative change of 1 in every element of `out`. Backward
    computes delta from the stored output.
    `shifts`: change of the gradients of q and k due to the output that a kernel stored.
    """

    out: Tensor
    lse: Tensor
    dead: Tensor
    seen: Tensor
    grads: dict[str, Tensor] = field(default_factory=dict)
    natural: dict[str, Tensor] = field(default_factory=dict)
    rounding: dict[str, float] = field(default_factory=dict)
    shifts: dict[str, Tensor] = field(default_factory=dict)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: Node | None = None,
    mask_mod: Node | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    params: Mapping[str, int | float] | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: CuSeqlens | None = None,
    scale: float | None = None,
    dtype: Any = torch.float64,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    wanted: Sequence[str] = ("q", "k", "v"),
    kv_lens: Tensor | None = None,
    aligned_to_end: bool = False,
    stored: Tensor | None = None,
) -> Result:
    """Compute attention and its gradients in `dtype`.

    q [B, HQ, SQ, D], k [B, HKV, SK, D], v [B, HKV, SK, DV], of any dtype and strides; HQ is a multiple of HKV.
    `sinks` [HQ] are logits without a value in the softmax of every row of their head. With `dout` [B, HQ, SQ, DV] and
    optionally `dlse` [B, HQ, SQ], the result has the gradients of `wanted`: inputs, buffers or `sinks`.

    Rows without keys have zeros, -inf (or their sink) and zero gradients. `kv_lens` [B] are the numbers of keys. With
    `aligned_to_end`, the last query is at the position of the last key. One (b, h) slice is in memory at a time.

    `cu_seqlens` are offsets of queries and keys of packed sequences. Then q is [TQ, HQ, D], k and v [TK, HKV, D], lse
    and dlse [HQ, TQ], and `b` is the index of a sequence. `stored` is the output that a kernel's backward pass read,
    for `shifts`.
    """
    mods = (score_mod, mask_mod)
    places = (kv_lens, aligned_to_end, cu_seqlens)
    others = (buffers or {}, params or {}, sinks, scale, dtype, dtype, dout, dlse, wanted, places)
    return _slices(q, k, v, mods, *others, stored=stored)


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: Node | None = None,
    mask_mod: Node | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    params: Mapping[str, int | float] | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: CuSeqlens | None = None,
    scale: float | None = None,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    wanted: Sequence[str] = ("q", "k", "v"),
    kv_lens: Tensor | None = None,
    aligned_to_end: bool = False,
    tf32: bool = False,
) -> Result:
    """Compute attention with matmuls in the inputs' dtype, modifications and softmax in fp32, and rounded P.

    Scores are float32, as in fused kernels: rounded to 16 bits, large scores would make P useless for comparison. With
    `tf32`, fp32 matmuls round their operands as PyTorch with TF32 does. Gradients are accumulated over slices in fp32
    and rounded once to the dtype of their input.
    """
    mods = (score_mod, mask_mod)
    places = (kv_lens, aligned_to_end, cu_seqlens)
    product = _tf32_matmul if tf32 else torch.matmul
    scored = _tf32_matmul if tf32 else _wide_matmul
    real, store = torch.float32, q.dtype
    return _slices(
        q,
        k,
        v,
        mods,
        buffers or {},
        params or {},
        sinks,
        scale,
        real,
        store,
        dout,
        dlse,
        wanted,
        places,
        product,
        scored,
    )


def to_tf32(x: Tensor) -> Tensor:
    """Round float32 to ten bits of mantissa, to nearest, ties away from zero."""
    rounded = ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


class _Tf32Matmul(torch.autograd.Function):  # type: ignore[misc]
    """Matrix product with operands rounded to TF32, forward and backward. Sums are fp32."""

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


class _WideMatmul(torch.autograd.Function):  # type: ignore[misc]
    """Matrix product in float32. Its gradients are products in the dtype of the matrices."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a.float() @ b.float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        grad = grad.to(a.dtype)
        return grad @ b.mT, a.mT @ grad


def _wide_matmul(a: Tensor, b: Tensor) -> Tensor:
    product: Tensor = _WideMatmul.apply(a, b)
    return product


def _slices(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mods: tuple[Node | None, Node | None],
    buffers: Mapping[str, Tensor],
    params: Mapping[str, int | float],
    sinks: Tensor | None,
    scale: float | None,
    real: Any,
    store: Any,
    dout: Tensor | None,
    dlse: Tensor | None,
    wanted: Sequence[str],
    places: tuple[Tensor | None, bool, CuSeqlens | None],
    product: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
    product_of_scores: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
    stored: Tensor | None = None,
) -> Result:
    kv_lens, aligned_to_end, cu_seqlens = places
    # [B, H, S, D], or packed [T, H, D]
    batch = len(q) if cu_seqlens is None else len(cu_seqlens[0]) - 1
    heads, heads_kv = q.shape[1], k.shape[1]
    group = heads // heads_kv
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    exact = store == torch.float64
    device = q.device
    result = Result(
        out=torch.zeros(*q.shape[:-1], v.shape[-1], dtype=store, device=device),
        lse=torch.full(
            q.shape[:-1] if cu_seqlens is None else (heads, len(q)), -torch.inf, dtype=real, device=device
        ),
        dead=torch.ones(q.shape[:-1], dtype=torch.bool, device=device),
        seen=torch.zeros(k.shape[:-1], dtype=torch.bool, device=device),
    )
    if sinks is not None:
        # No expression reads sinks. Without them, a buffer or parameter may have the name.
        buffers = {**buffers, "sinks": sinks}
        result.lse.copy_(sinks.detach()[:, None])
    differentiate = dout is not None
    env: dict[str, Any] = {"B": batch, "HQ": heads, "HKV": heads_kv, "inf": torch.inf}
    env |= dict(params)
    env |= {name: value.detach() for name, value in buffers.items()}
    env |= {} if kv_lens is None else {"kv_lens": kv_lens}
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
    rounding = {name: torch.zeros_like(total) for name, total in natural.items()}
    if stored is not None:
        result.shifts.update({n: torch.zeros_like(sums[n]) for n in ("q", "k") if n in sums})

    for b in range(batch):
        for h in range(heads):
            at, row = _place(b, h, h // group, cu_seqlens)
            here = {n: t[at[n]].detach().to(store).requires_grad_(differentiate) for n, t in inputs.items()}
            sq, sk = len(here["q"]), len(here["k"])
            scores = product_of_scores(here["q"], here["k"].mT).to(real) * scale
            length = sk if kv_lens is None else int(kv_lens[b])
            first = length - sq if aligned_to_end else 0
            env |= {"b": b, "h": h, "SQ": sq, "SK": sk}
            modded = _modified(scores, mods, env, real, first, length)
            visible = modded.detach() > -torch.inf
            if sinks is not None:
                # One more column; its row of V is zero.
                modded = torch.cat([modded, env["sinks"][h].to(real).expand(sq, 1)], 1)
            p, lse = _softmax(modded)
            out = product(p[:, :sk].to(store), here["v"])
            result.out[at["q"]] = out.detach()
            result.lse[row] = lse.detach()
            result.dead[at["q"]] = ~visible.any(1)
            result.seen[at["k"]] |= visible.any(0)
            if dout is None:
                continue
            cotangents = [
                dout[at["q"]].to(store),
                torch.zeros_like(lse) if dlse is None else dlse[row].to(real),
            ]
            sources = {n: here[n] if n in here else leaves[n] for n in sums}
            if exact and modded.requires_grad:
                uncancelled = _uncancelled(p.detach(), here["v"].detach(), *cotangents)
                scored = {n: sources[n] for n in natural}
                _accumulate(natural, at, scored, [modded], [uncancelled])
                delta = (out.detach() * cotangents[0]).norm(dim=1, keepdim=True)
                _accumulate(rounding, at, scored, [modded], [p.detach() * delta])
                if stored is not None:
                    off = (stored[at["q"]].to(real) - out.detach()) * cotangents[0]
                    moved = {n: sources[n] for n in result.shifts}
                    _accumulate(result.shifts, at, moved, [modded], [-p.detach() * off.sum(1, keepdim=True)])
            _accumulate(sums, at, sources, [out, lse], cotangents)

    rows = {name: total.norm(dim=-1) if total.ndim else total.abs() for name, total in natural.items()}
    result.natural.update(rows)
    # Few rows do not average their errors.
    spread = 1 + 2 / math.sqrt(max(1, result.lse.numel()))
    result.rounding.update({name: spread * float(total.norm()) for name, total in rounding.items()})
    for name, total in sums.items():
        result.grads[name] = total if exact else total.to((inputs | dict(buffers))[name].dtype)
    return result


def _place(
    b: int, h: int, h_kv: int, cu_seqlens: CuSeqlens | None
) -> tuple[dict[str, Place], tuple[int, int | slice]]:
    """Return the place of a slice (b, h) in q, k and v, and in lse."""
    if cu_seqlens is None:
        return {"q": (b, h), "k": (b, h_kv), "v": (b, h_kv)}, (b, h)
    rows, columns = (slice(ends[b], ends[b + 1]) for ends in cu_seqlens)
    return {"q": (rows, h), "k": (columns, h_kv), "v": (columns, h_kv)}, (h, rows)


def _modified(
    scores: Tensor,
    mods: tuple[Node | None, Node | None],
    env: dict[str, Any],
    real: Any,
    first: int,
    length: int,
) -> Tensor:
    """Return the scores [SQ, SK] after both modifications, -inf if masked. Query 0 is at position `first`."""
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
    # Evaluate visible pairs only: autograd would multiply an infinite derivative of a hidden pair by zero,
    # which is NaN.
    q_idx, kv_idx = mask.nonzero(as_tuple=True)
    env |= {"q_idx": first + q_idx, "kv_idx": kv_idx, "score": scores[mask]}
    hidden = scores.masked_fill(~mask, -torch.inf)
    if not len(q_idx):
        return hidden
    return hidden.masked_scatter(mask, evaluate(score_mod, env, torch, real).expand(q_idx.shape))


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return softmax over the last dimension and its log-sum-exp; zeros and -inf for rows of -inf."""
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
    """Return the gradient of the scores [SQ, SK], and of a sink, without cancellation in `p * (dp - delta + dlse)`.

    Delta is a sum over the columns of the rounded output. Its rounding errors remain if the columns cancel.
    """
    dp = torch.nn.functional.pad(dout @ v.mT, (0, p.shape[1] - len(v)))
    delta = (p * dp).sum(1, keepdim=True).abs()
    columns = (dout * (p[:, : len(v)] @ v)).norm(dim=1, keepdim=True)
    return p * (dp.abs() + torch.maximum(delta, columns) + dlse.abs()[:, None])


def _accumulate(
    sums: dict[str, Tensor],
    at: Mapping[str, Place],
    sources: Mapping[str, Tensor],
    outputs: list[Tensor],
    cotangents: list[Tensor],
) -> None:
    """Add the gradients of one slice to the sums of the whole."""
    # A log-sum-exp of scores that do not read `score` has no gradient.
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    grads = torch.autograd.grad(
        [o for o, _ in pairs],
        list(sources.values()),
        [c for _, c in pairs],
        retain_graph=True,
        allow_unused=True,
    )
    for name, grad in zip(sources, grads, strict=True):
        if grad is not None:
            target = sums[name][at[name]] if name in at else sums[name]
            target += grad.to(target.dtype)
