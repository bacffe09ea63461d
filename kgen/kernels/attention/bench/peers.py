"""The peers of an attention kernel: the same attention as a PyTorch user would write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kgen.bench.peers import FLASH_ATTENTION_4, DoesNotApply
from kgen.expr.nodes import Call, Type, Var, variables
from kgen.kernels.attention.bench.libraries import (
    Attention,
    by_token,
    causal_when_packed,
    cudnn_flex,
    flash_attention_3,
    flash_attention_4,
)
from kgen.kernels.attention.bench.packed import Packing
from kgen.kernels.attention.bench.source import mods
from kgen.kernels.attention.bench.workload import Workload
from kgen.kernels.attention.schedules import CHIPS
from kgen.kernels.attention.verify.cache import paged
from kgen.verify.call import take_portable_kernels
from kgen.verify.toolchain import import_file

MASK_AT_ONCE = 2**28
"""Largest number of pairs whose mask is evaluated without compilation: 2 GB at 8 bytes each."""


def emitted_block_mask(function: Any, workload: Workload) -> Any:
    """Build the block mask of an emitted function with its `<name>_block_mask`."""
    make = function.__globals__[f"{workload.problem.name}_block_mask"]
    code = make.__code__
    names = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    given = {**workload.buffers, **workload.runtime, "device": workload.q.device}
    size = workload.sizes
    sizes = (size["B"], size["HQ"], size["HKV"], size["SQ"], size["SK"])
    return make(*sizes, **{n: value for n, value in given.items() if n in names})


def create_block_mask(workload: Workload, compiled: bool) -> Callable[[], Any]:
    """Return a function that builds FlexAttention's block mask.

    The mask has a batch or head dimension only if it depends on it. Without compilation PyTorch
    evaluates the mask for all pairs at once. Masks with more than `MASK_AT_ONCE` pairs are
    therefore always compiled.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    mask_mod = mods(workload)[1]
    used = variables(workload.problem.mask_mod) if workload.problem.mask_mod is not None else ()
    size, device = workload.sizes, workload.q.device
    batch, heads = (size["B"] if "b" in used else None), (size["HQ"] if "h" in used else None)
    compiled = compiled or (batch or 1) * (heads or 1) * size["SQ"] * size["SK"] > MASK_AT_ONCE
    build = (
        torch.compile(create_block_mask) if compiled and workload.q.is_cuda else create_block_mask
    )
    return lambda: build(mask_mod, batch, heads, size["SQ"], size["SK"], device=str(device))


def _kgen(workload: Workload, function: Any, largest: bool = False) -> Attention:
    """Return a call of an emitted function. With `largest`, it also computes `row_max`."""
    run = (lambda *x, **named: function(*x, return_max=True, **named)[0]) if largest else function
    if workload.packing is not None:
        return _kgen_packed(workload, workload.packing, run)
    keywords: dict[str, Any] = {**workload.buffers, **workload.runtime}
    problem, k = workload.problem, workload.k
    if problem.per_batch:
        keywords["kv_lens"] = torch.full((len(k),), k.shape[2], dtype=torch.int32, device=k.device)
    if problem.block_mask:
        keywords["block_mask"] = emitted_block_mask(function, workload)
    if problem.page_size is None:
        return lambda q, k, v: run(q, k, v, **keywords)
    lens = keywords["kv_lens"].cpu()
    pages_k, table = paged(workload.k, lens, problem.page_size)
    pages_v, _ = paged(workload.v, lens, problem.page_size)
    keywords["block_table"] = table.to(k.device)
    return lambda q, k, v: run(q, pages_k, pages_v, **keywords)


def _kgen_packed(workload: Workload, packing: Packing, function: Any) -> Attention:
    keywords = {
        b.name: workload.buffers[b.name] for b in packing.problem.buffers
    } | workload.runtime
    cu_seqlens = packing.arguments
    return lambda q, k, v: function(
        by_token(q), by_token(k), by_token(v), *cu_seqlens, **keywords
    ).transpose(0, 1)[None]


def _varlen(workload: Workload) -> Attention:
    """PyTorch's `varlen_attn`, FlashAttention over packed sequences."""
    packing = workload.packing
    if packing is None or packing.problem.score_mod is not None or packing.problem.sinks:
        raise DoesNotApply
    masked = packing.problem.mask_mod is not None
    if masked and not causal_when_packed(packing):
        raise DoesNotApply
    keywords: dict[str, Any] = {"window_size": (-1, 0)} if masked else {}
    from torch.nn.attention.varlen import varlen_attn

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if workload.group > 1:
            k, v = (x.repeat_interleave(workload.group, 1) for x in (k, v))
        longest = (packing.longest, packing.longest)
        out: Tensor = varlen_attn(
            by_token(q), by_token(k), by_token(v), *packing.arguments, *longest, **keywords
        )
        return out.transpose(0, 1)[None]

    return attention


def _flex(
    workload: Workload, kernel_options: dict[str, Any] | None = None, mode: str | None = None
) -> Attention:
    from torch.nn.attention.flex_attention import flex_attention

    score_mod, mask_mod = mods(workload)
    # It is built once, so compilation does not pay.
    block_mask = None if mask_mod is None else create_block_mask(workload, compiled=False)()
    attention = torch.compile(flex_attention, dynamic=False, mode=mode)
    keywords = {"score_mod": score_mod, "block_mask": block_mask, "enable_gqa": workload.group > 1}
    keywords["kernel_options"] = kernel_options
    if workload.problem.sinks:
        return lambda q, k, v: _with_sinks(
            attention(q, k, v, **keywords, return_lse=True), workload
        )
    return lambda q, k, v: attention(q, k, v, **keywords)


def _flex_flash(workload: Workload) -> Attention:
    FLASH_ATTENTION_4.load()
    return _flex(workload, {"BACKEND": "FLASH"})


def _with_sinks(result: tuple[Tensor, Tensor], workload: Workload) -> Tensor:
    """Add sinks to the normalizer of a result, as transformers does for FlexAttention."""
    out, lse = result
    sinks = workload.buffers["sinks"][:, None]
    return (out * torch.sigmoid(lse - sinks)[..., None]).to(out.dtype)


def _sdpa(workload: Workload) -> Attention:
    problem = workload.problem
    q_idx, kv_idx = Var("q_idx", Type.INT), Var("kv_idx", Type.INT)
    causal = (Call("ge", (q_idx, kv_idx), Type.BOOL), Call("le", (kv_idx, q_idx), Type.BOOL))
    if problem.sinks or problem.score_mod is not None or problem.mask_mod not in (None, *causal):
        raise DoesNotApply
    sdpa = torch.nn.functional.scaled_dot_product_attention
    # The causal mask of SDPA aligns the first query with the first key. A single query at the last
    # key sees all keys.
    last = workload.first == workload.k.shape[2] - 1
    keywords = {
        "is_causal": problem.mask_mod is not None and not last,
        "enable_gqa": workload.group > 1,
    }
    return lambda q, k, v: sdpa(q, k, v, **keywords)


def _eager(workload: Workload) -> Attention:
    score_mod, mask_mod = mods(workload)
    size, device = workload.sizes, workload.q.device
    b, h, q_idx, kv_idx = (
        torch.arange(size[name], device=device).view([-1 if i == axis else 1 for i in range(4)])
        for axis, name in enumerate(("B", "HQ", "SQ", "SK"))
    )
    mask = None if mask_mod is None else mask_mod(b, h, q_idx, kv_idx)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(workload.group, 1) for t in (k, v))
        scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
        if score_mod is not None:
            scores = score_mod(scores, b, h, q_idx, kv_idx)
        if mask is not None:
            # With -inf, a row without keys would be NaN, and so would its gradient.
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        if workload.problem.sinks:
            column = workload.buffers["sinks"][:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, column], -1)
        p = torch.softmax(scores, -1)[..., : size["SK"]]
        if mask is not None:
            p = p.masked_fill(~mask, 0.0)
        return p.to(q.dtype) @ v

    return attention


def _for_every_chip(workload: Workload, functions: Mapping[str, Any]) -> Attention:
    """The portable kernels of the emitted file."""
    name = workload.problem.name
    files = [
        f.__globals__["__file__"]
        for f in functions.values()
        if any(chip.choice in f.__globals__ for chip in CHIPS)
    ]
    if not files:
        raise DoesNotApply
    module: Any = import_file(Path(files[0]), f"kgen_for_every_chip_{name}")
    take_portable_kernels(module)
    return _kgen(workload, getattr(module, name))


def _with_row_max(workload: Workload, functions: Mapping[str, Any]) -> Attention:
    """The first emitted function, with `return_max=True`."""
    if not workload.problem.row_max:
        raise DoesNotApply
    return _kgen(workload, next(iter(functions.values())), largest=True)


def prepare(name: str, workload: Workload, functions: Mapping[str, Any]) -> Attention:
    """Return a peer by name; `functions` are the emitted ones. Raise `DoesNotApply` if it cannot
    compute the spec."""
    if name in functions:
        return _kgen(workload, functions[name])
    made: dict[str, Callable[[], Attention]] = {
        "kgen-triton": lambda: _for_every_chip(workload, functions),
        "kgen-max": lambda: _with_row_max(workload, functions),
        "flex": lambda: _flex(workload),
        "flex-autotune": lambda: _flex(workload, mode="max-autotune-no-cudagraphs"),
        "flex-flash": lambda: _flex_flash(workload),
        "sdpa": lambda: _sdpa(workload),
        "varlen": lambda: _varlen(workload),
        "cudnn-flex": lambda: cudnn_flex(workload),
        "fa3": lambda: flash_attention_3(workload),
        "fa4": lambda: flash_attention_4(workload),
        "eager": lambda: _eager(workload),
    }
    return made[name]()
