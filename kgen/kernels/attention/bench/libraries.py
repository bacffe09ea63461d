"""Peers from other libraries: cuDNN's attention over intervals, and FlashAttention 3 and 4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kgen.bench.peers import (
    CUDNN_FLEX,
    FLASH_ATTENTION_3,
    FLASH_ATTENTION_4,
    DoesNotApply,
    Package,
)
from kgen.expr.nodes import reads, variables
from kgen.kernels.attention.bench.intervals import Window, intervals, window
from kgen.kernels.attention.bench.packed import Packing
from kgen.kernels.attention.bench.workload import Workload
from kgen.verify.evaluate import evaluate

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

LARGEST_CAP = 1e6
"""Scores up to this number show if a score modification is a soft cap."""


def by_token(x: Tensor) -> Tensor:
    """Reshape [1, H, T, D] to [T, H, D] by views. The gradient of `x[0]` would be a copy."""
    return x.squeeze(0).transpose(0, 1)


def cudnn_flex(workload: Workload) -> Attention:
    """Return cuDNN's `flex_attn_func`. Its plan of the mask is built before the timing."""
    _require_half(workload)
    if workload.problem.score_mod is not None:
        raise DoesNotApply
    flex = CUDNN_FLEX.load()
    learns = "backward" in workload.problem.passes
    operands = [x.transpose(1, 2) for x in (workload.q, workload.k, workload.v)]
    plan = flex.create_mask_plan(endpoints(workload), *operands, build_backward=learns)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = flex.flex_attn_func(q, k, v, mask_plan=plan)
        return out.transpose(1, 2)

    return attention


def endpoints(workload: Workload) -> Tensor:
    """Return the mask as cuDNN's endpoints F, int32 [1 or HQ, N, B * SQ] with an odd N.

    A query sees the keys of [0, F0), [F1, F2), [F3, F4) and so on.
    """
    ends = intervals(workload)
    heads, _, queries, most, _ = ends.shape
    batch = workload.sizes["B"]
    found = ends.flatten(3).expand(heads, batch, queries, 2 * most)
    # cuDNN's first interval begins at 0. It is empty if one of the mask's does not.
    late = bool(found[..., 0].any())
    found = torch.nn.functional.pad(found, (1, 0)) if late else found[..., 1:]
    return found.reshape(heads, batch * queries, -1).transpose(1, 2).contiguous()


def flash_attention_3(workload: Workload) -> Attention:
    """Return FlashAttention-3, which runs on compute capability 9.0 and has no package."""
    return _flash(workload, FLASH_ATTENTION_3, -1)


def flash_attention_4(workload: Workload) -> Attention:
    """Return FlashAttention-4 by its own functions, without FlexAttention."""
    return _flash(workload, FLASH_ATTENTION_4, None)


def _flash(workload: Workload, package: Package, unbounded: int | None) -> Attention:
    """Return `flash_attn_func`, or `flash_attn_varlen_func` for packed sequences.

    `unbounded` is the library's number for a side of the window without a bound.
    """
    _require_half(workload)
    cap, packing = softcap(workload), workload.packing
    library = package.load()
    bounds = window(workload) if packing is None else _packed_window(packing)
    keywords: dict[str, Any] = {"causal": bounds.causal}
    if not bounds.causal:
        sides = (bounds.left, bounds.right)
        keywords["window_size"] = tuple(unbounded if n is None else n for n in sides)
    if cap:
        keywords["softcap"] = cap
    if packing is None:
        return lambda q, k, v: _only_out(
            library.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **keywords)
        ).transpose(1, 2)
    cu_seqlens_q, cu_seqlens_k = packing.arguments
    keywords |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    keywords |= {"max_seqlen_q": packing.longest, "max_seqlen_k": packing.longest}
    return lambda q, k, v: _only_out(
        library.flash_attn_varlen_func(*(by_token(x) for x in (q, k, v)), **keywords)
    ).transpose(0, 1)[None]


def _only_out(result: Any) -> Tensor:
    """Return the output. Some versions also return the log-sum-exp."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


def _require_half(workload: Workload) -> None:
    """Raise `DoesNotApply` unless these libraries can have the workload.

    They have no sinks, no gradients of buffers, no fp32, and other functions for decoding.
    """
    problem = workload.problem
    learned = any(b.grad for b in problem.buffers)
    decoding = workload.sizes["SQ"] != workload.sizes["SK"]
    if problem.sinks or learned or decoding or workload.q.dtype == torch.float32:
        raise DoesNotApply


def _packed_window(packing: Packing) -> Window:
    if packing.problem.mask_mod is None:
        return Window(None, None)
    if not causal_when_packed(packing):
        raise DoesNotApply
    return Window(None, 0)


def causal_when_packed(packing: Packing) -> bool:
    """True if the mask of packed sequences is causal in each sequence."""
    mask_mod = packing.problem.mask_mod
    # Both sides have equal lengths, so a mask that is causal for one length is causal for all.
    indices = torch.arange(64)
    env = {"SQ": 64, "SK": 64, "q_idx": indices[:, None], "kv_idx": indices[None, :]}
    if mask_mod is None or variables(mask_mod) - env.keys() or reads(mask_mod):
        return False
    causal = torch.ones(64, 64).tril().bool()
    return bool(torch.equal(evaluate(mask_mod, env, torch), causal))


def softcap(workload: Workload) -> float:
    """Return the cap if the score modification is `cap * tanh(score / cap)`, and 0 if there is
    none. Raise `DoesNotApply` for others."""
    tree = workload.problem.score_mod
    if tree is None:
        return 0.0
    if variables(tree) - {"score", *workload.params} or reads(tree):
        raise DoesNotApply
    scores = torch.logspace(-2, 2, 32)
    env = {**workload.params, "inf": torch.inf}
    cap = float(evaluate(tree, env | {"score": torch.tensor(1e30)}, torch, torch.float32))
    found = evaluate(tree, env | {"score": scores}, torch, torch.float32)
    if not 0 < cap < LARGEST_CAP or not torch.allclose(found, cap * torch.tanh(scores / cap)):
        raise DoesNotApply
    return cap
