"""Attention on plain PyTorch, from the original expression trees.

`attention` computes the truth in float64. `eager` computes as eager PyTorch in the kernel's dtype,
for comparison of errors. Both evaluate the trees as written, so a wrong simplification cannot hide.
Both use gradients of autograd, not symbolic derivatives.
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
    `row_max` [B, HQ, SQ], the largest score of a row after both modifications; -inf without keys.
    `dead` [B, HQ, SQ], true for rows without keys.
    `seen` [B, HKV, SK], true for keys that any query of the group sees.
    `grads` by name (`q`, `k`, `v` and buffers).
    `natural`: norms of the rows of each gradient without cancellation. Rounding errors are relative
    to them. `rounding`: change of each gradient, as a whole, for a relative change of 1 in every
    element of `out`. Backward computes delta from the stored output.
    `shifts`: change of the gradients of q and k due to the output that a kernel stored.
    """

    out: Tensor
    lse: Tensor
    row_max: Tensor
    dead: Tensor
    seen: Tensor
    grads: dict[str, Tensor] = field(default_factory=dict)
    natural: dict[str, Tensor] = field(default_factory=dict)
    rounding: dict[str, float] = field(default_factory=dict)
    shifts: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """The arguments of a call except q, k and v.

    - `sinks`, [HQ]: logits that join the softmax of every row of their head, without a value.
    - `dout`, [B, HQ, SQ, DV], and `dlse`, [B, HQ, SQ]: if present, the gradients in `wanted` are
      computed.
    - `kv_lens`, [B]: the number of keys of each sequence.
    - `aligned_to_end`: the last query is at the position of the last key.
    - `cu_seqlens`: the offsets of queries and keys of packed sequences.
    """

    score_mod: Node | None = None
    mask_mod: Node | None = None
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    params: Mapping[str, int | float] = field(default_factory=dict)
    sinks: Tensor | None = None
    cu_seqlens: CuSeqlens | None = None
    scale: float | None = None
    dout: Tensor | None = None
    dlse: Tensor | None = None
    wanted: Sequence[str] = ("q", "k", "v")
    kv_lens: Tensor | None = None
    aligned_to_end: bool = False


PLAIN = Call()


@dataclass(frozen=True)
class _Arithmetic:
    """The dtypes of modifications and softmax (`real`) and of stored tensors, and the two
    products.
    """

    real: Any
    store: Any
    product: Callable[[Tensor, Tensor], Tensor] = torch.matmul
    product_of_scores: Callable[[Tensor, Tensor], Tensor] = torch.matmul


def attention(
    q: Tensor, k: Tensor, v: Tensor, call: Call = PLAIN, *, stored: Tensor | None = None
) -> Result:
    """Compute attention and its gradients in float64.

    - q: [B, HQ, SQ, D]; k: [B, HKV, SK, D]; v: [B, HKV, SK, DV]. Any dtype and strides.
    - With `cu_seqlens`: q [TQ, HQ, D], k [TK, HKV, D], v [TK, HKV, DV], lse and dlse [HQ, TQ]. `b`
      is the index of a sequence.
    - HQ is a multiple of HKV. Rows without a key have zeros, -inf (or their sink) and zero
      gradients.
    - `stored`: the output that the backward pass of a kernel read, for `shifts`.

    One (b, h) slice is in memory at a time.
    """
    return _Slices(q, k, v, call, _Arithmetic(torch.float64, torch.float64), stored).computed()


def eager(q: Tensor, k: Tensor, v: Tensor, call: Call = PLAIN, *, tf32: bool = False) -> Result:
    """Compute attention with matmuls in the inputs' dtype, modifications and softmax in fp32, and
    rounded P.

    Scores are float32, as in fused kernels: rounded to 16 bits, large scores would make P useless
    for comparison. With `tf32`, fp32 matmuls round their operands as PyTorch with TF32 does.
    Gradients are accumulated over slices in fp32 and rounded once to the dtype of their input.
    """
    product = _tf32_matmul if tf32 else torch.matmul
    scored = _tf32_matmul if tf32 else _wide_matmul
    return _Slices(q, k, v, call, _Arithmetic(torch.float32, q.dtype, product, scored)).computed()


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


@dataclass(frozen=True)
class _Slice:
    """The slice of one (b, h): its inputs and the results of attention."""

    at: Mapping[str, Place]
    row: tuple[int, int | slice]
    """Its place in lse."""
    inputs: Mapping[str, Tensor]
    scores: Tensor
    """After both modifications, with a column for a sink."""
    p: Tensor
    out: Tensor
    lse: Tensor


class _Slices:
    """Attention one (b, h) slice at a time, with sums of the gradients."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: Call,
        arithmetic: _Arithmetic,
        stored: Tensor | None = None,
    ) -> None:
        self.call, self.arithmetic, self.stored = call, arithmetic, stored
        self.inputs = {"q": q, "k": k, "v": v}
        # [B, H, S, D], or packed [T, H, D]
        self.batch = len(q) if call.cu_seqlens is None else len(call.cu_seqlens[0]) - 1
        self.heads, self.heads_kv = q.shape[1], k.shape[1]
        self.scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
        self.exact = arithmetic.store == torch.float64
        # No expression reads sinks: without them the name may be a buffer's or a param's.
        self.buffers = {**call.buffers, **({} if call.sinks is None else {"sinks": call.sinks})}
        self.env: dict[str, Any] = {
            "B": self.batch,
            "HQ": self.heads,
            "HKV": self.heads_kv,
            "inf": torch.inf,
        }
        self.env |= dict(call.params)
        self.env |= {name: value.detach() for name, value in self.buffers.items()}
        self.env |= {} if call.kv_lens is None else {"kv_lens": call.kv_lens}
        self.result = self._no_result()
        self._start_sums([] if call.dout is None else call.wanted)

    def _no_result(self) -> Result:
        """The result of rows that see no key."""
        q, k, v = self.inputs.values()
        rows = q.shape[:-1] if self.call.cu_seqlens is None else (self.heads, len(q))
        on = {"device": q.device}
        result = Result(
            out=torch.zeros(*q.shape[:-1], v.shape[-1], dtype=self.arithmetic.store, **on),
            lse=torch.full(rows, -torch.inf, dtype=self.arithmetic.real, **on),
            row_max=torch.full(rows, -torch.inf, dtype=self.arithmetic.real, **on),
            dead=torch.ones(q.shape[:-1], dtype=torch.bool, **on),
            seen=torch.zeros(k.shape[:-1], dtype=torch.bool, **on),
        )
        if self.call.sinks is not None:
            result.lse.copy_(self.call.sinks.detach()[:, None])
        return result

    def _start_sums(self, wanted: Sequence[str]) -> None:
        """Zeros for the gradients, and for the bounds of their errors; buffers with one become
        leaves.
        """
        real, device = self.arithmetic.real, self.inputs["q"].device
        self.leaves: dict[str, Tensor] = {}
        for name in (n for n in wanted if n in self.buffers):
            leaf = self.buffers[name].detach().to(real).requires_grad_()
            self.leaves[name] = self.env[name] = leaf
        self.sums = {name: torch.zeros_like(leaf) for name, leaf in self.leaves.items()}
        own = {n: self.inputs[n].shape for n in wanted if n in self.inputs}
        self.sums |= {n: torch.zeros(shape, dtype=real, device=device) for n, shape in own.items()}
        self.natural = {
            name: torch.zeros_like(total) for name, total in self.sums.items() if name != "v"
        }
        self.rounding = {name: torch.zeros_like(total) for name, total in self.natural.items()}
        if self.stored is not None:
            moved = (n for n in ("q", "k") if n in self.sums)
            self.result.shifts.update({n: torch.zeros_like(self.sums[n]) for n in moved})

    def computed(self) -> Result:
        """The results of all slices."""
        for b in range(self.batch):
            for h in range(self.heads):
                one = self._forward(b, h)
                if self.call.dout is not None:
                    self._backward(one, self.call.dout)
        self._finish()
        return self.result

    def _forward(self, b: int, h: int) -> _Slice:
        call, arithmetic = self.call, self.arithmetic
        at, row = _place(b, h, h // (self.heads // self.heads_kv), call.cu_seqlens)
        differentiate = call.dout is not None
        here = {
            n: t[at[n]].detach().to(arithmetic.store).requires_grad_(differentiate)
            for n, t in self.inputs.items()
        }
        sq, sk = len(here["q"]), len(here["k"])
        scores = (
            arithmetic.product_of_scores(here["q"], here["k"].mT).to(arithmetic.real) * self.scale
        )
        length = sk if call.kv_lens is None else int(call.kv_lens[b])
        first = length - sq if call.aligned_to_end else 0
        self.env |= {"b": b, "h": h, "SQ": sq, "SK": sk}
        mods = (call.score_mod, call.mask_mod)
        modded = _modified(scores, mods, self.env, arithmetic.real, first, length)
        visible = modded.detach() > -torch.inf
        if sk:
            self.result.row_max[row] = modded.detach().amax(1)
        if call.sinks is not None:
            # One more column, whose row of V is zero.
            sink = self.env["sinks"][h].to(arithmetic.real).expand(sq, 1)
            modded = torch.cat([modded, sink], 1)
        p, lse = _softmax(modded)
        out = arithmetic.product(p[:, :sk].to(arithmetic.store), here["v"])
        self.result.out[at["q"]] = out.detach()
        self.result.lse[row] = lse.detach()
        self.result.dead[at["q"]] = ~visible.any(1)
        self.result.seen[at["k"]] |= visible.any(0)
        return _Slice(at, row, here, modded, p, out, lse)

    def _backward(self, one: _Slice, dout: Tensor) -> None:
        dlse = self.call.dlse
        cotangents = [
            dout[one.at["q"]].to(self.arithmetic.store),
            torch.zeros_like(one.lse) if dlse is None else dlse[one.row].to(self.arithmetic.real),
        ]
        sources = {n: one.inputs[n] if n in one.inputs else self.leaves[n] for n in self.sums}
        if self.exact and one.scores.requires_grad:
            self._bound(one, sources, cotangents)
        _accumulate(self.sums, one.at, sources, [one.out, one.lse], cotangents)

    def _bound(
        self, one: _Slice, sources: Mapping[str, Tensor], cotangents: Sequence[Tensor]
    ) -> None:
        """Add to the sums by which errors are judged: `natural`, `rounding` and `shifts`."""
        dout, dlse = cotangents
        p, out = one.p.detach(), one.out.detach()
        scored = {n: sources[n] for n in self.natural}
        uncancelled = _uncancelled(p, one.inputs["v"].detach(), dout, dlse)
        _accumulate(self.natural, one.at, scored, [one.scores], [uncancelled])
        delta = (out * dout).norm(dim=1, keepdim=True)
        _accumulate(self.rounding, one.at, scored, [one.scores], [p * delta])
        if self.stored is not None:
            off = (self.stored[one.at["q"]].to(self.arithmetic.real) - out) * dout
            moved = {n: sources[n] for n in self.result.shifts}
            shift = -p * off.sum(1, keepdim=True)
            _accumulate(self.result.shifts, one.at, moved, [one.scores], [shift])

    def _finish(self) -> None:
        """Write the gradients and their bounds into the result."""
        result = self.result
        for name, total in self.natural.items():
            result.natural[name] = total.norm(dim=-1) if total.ndim else total.abs()
        # The errors of few rows do not average out.
        spread = 1 + 2 / math.sqrt(max(1, result.lse.numel()))
        result.rounding.update(
            {n: spread * float(total.norm()) for n, total in self.rounding.items()}
        )
        dtypes = {name: x.dtype for name, x in (self.inputs | self.buffers).items()}
        for name, total in self.sums.items():
            result.grads[name] = total if self.exact else total.to(dtypes[name])


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
    """Return the scores [SQ, SK] after both modifications, -inf if masked.

    Query 0 is at position `first`.
    """
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
    # Evaluate only visible pairs. At a hidden pair, autograd would multiply an infinite derivative
    # by zero, which is NaN.
    q_idx, kv_idx = mask.nonzero(as_tuple=True)
    env |= {"q_idx": first + q_idx, "kv_idx": kv_idx, "score": scores[mask]}
    hidden = scores.masked_fill(~mask, -torch.inf)
    if not len(q_idx):
        return hidden
    return hidden.masked_scatter(mask, evaluate(score_mod, env, torch, real).expand(q_idx.shape))


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return softmax over the last dimension and its log-sum-exp; zeros and -inf for rows of
    -inf.
    """
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
    """Return the gradient of the scores [SQ, SK], and of a sink, without cancellation in
    `p * (dp - delta + dlse)`.

    Delta is a sum over the columns of the rounded output. Its rounding errors remain if the columns
    cancel.
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
    # A log-sum-exp of scores without `score` depends on none of them.
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
