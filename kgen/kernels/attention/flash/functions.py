"""Calls of FlashAttention's functions, computed by the kernels of a package.

A call that no kernels of the package compute raises `ValueError`, with a reason for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .covering import Call, Kernels, bounds, chosen, reasons, regular

Results = tuple[Tensor, Tensor | None]
"""The output, and the natural log-sum-exp of each row, or None."""


@dataclass(frozen=True)
class Options:
    """Arguments that all functions of FlashAttention have."""

    scale: float | None
    causal: bool
    window: Sequence[int]
    softcap: float
    slopes: Tensor | None
    with_lse: bool
    deterministic: bool = False


@dataclass(frozen=True)
class Package:
    """The kernels of a package, and its name for messages."""

    name: str
    table: tuple[Kernels, ...]

    def refuse(self, **arguments: Any) -> None:
        """Raise ValueError for an argument that is set, because no kernels support it."""
        for name, value in arguments.items():
            if value is not None and not (isinstance(value, float | int) and value == 0):
                got = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise ValueError(f"{self.name}: no kernels support `{name}`, got {got}")

    def dense(self, options: Options, q: Tensor, k: Tensor, v: Tensor) -> Results:
        """Return out and lse of sequences of one length, [B, S, H, D]."""
        self._check(4, q, k, v)
        call = replace(_call("dense", options, q, k, v), queries=q.shape[1], keys=k.shape[1])
        return self._turned(self._chosen(options, call), options, (q, k, v))

    def packed(
        self,
        options: Options,
        tensors: tuple[Tensor, Tensor, Tensor],
        offsets: tuple[Tensor, Tensor],
        longest: tuple[int, int],
    ) -> Results:
        """Return out and lse of packed sequences, [T, H, D]."""
        self._check(3, *tensors)
        call = replace(
            _call("packed", options, *tensors),
            queries=longest[0],
            keys=longest[1],
            square=offsets[0].data_ptr() == offsets[1].data_ptr(),
        )
        kernels = self._chosen(options, call)
        return self._run(kernels, options, (*tensors, *offsets))

    def cached(
        self,
        options: Options,
        tensors: tuple[Tensor, Tensor, Tensor],
        lengths: int | Tensor | None,
        block_table: Tensor | None,
        new: tuple[Tensor | None, Tensor | None],
    ) -> Results:
        """Return out and lse of queries [B, S, H, D] and a cache, after `new` keys are written."""
        self._check(4, *tensors)
        q, k_cache, v_cache = tensors
        total = self._with_new(lengths, new)
        kernels, keys = self._for_cache(options, tensors, total, block_table)
        _write(k_cache, new[0], lengths, block_table)
        _write(v_cache, new[1], lengths, block_table)
        if kernels.layout == "dense":
            return self._turned(kernels, options, (q, k_cache[:, :keys], v_cache[:, :keys]))
        if not isinstance(total, Tensor):
            total = torch.full((len(q),), keys, dtype=torch.int32, device=q.device)
        if block_table is None:
            return self._turned(kernels, options, tensors, kv_lens=total)
        pages = {"kv_lens": total, "block_table": block_table}
        out, lse = self._run(kernels, options, (q.transpose(1, 2), k_cache, v_cache), **pages)
        return out.transpose(1, 2), lse

    # --- parts ------------------------

    def _check(self, axes: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raise ValueError for tensors that no kernels support."""
        if not (q.dim() == k.dim() == v.dim() == axes):
            got = ", ".join(str(list(x.shape)) for x in (q, k, v))
            raise ValueError(f"{self.name}: q, k and v must have {axes} dimensions, got {got}")
        if not regular(q, k, v):
            raise ValueError(
                f"{self.name}: q, k and v must be dense tensors on one device, "
                "and their last stride must be at most 2**24"
            )

    def _chosen(self, options: Options, call: Call) -> Kernels:
        """Return the kernels for a call, or raise ValueError."""
        if found := chosen(self.table, call):
            return found
        raise ValueError(
            f"{self.name}: no kernels support causal={options.causal}, "
            f"window_size={tuple(options.window)}, softcap={options.softcap}"
            f"{', ALiBi' if call.slope_axes else ''} for {call.heads} "
            f"query heads, {call.kv_heads} key heads, heads of {call.head[0]} and {call.dtype}:"
            f"{reasons(self.table, call)}"
        )

    def _run(
        self, kernels: Kernels, options: Options, tensors: tuple[Tensor, ...], **more: Tensor
    ) -> Results:
        """Call the function of the kernels."""
        # Dense kernels may add dq by atomics, unless PyTorch requires deterministic algorithms.
        free = kernels.layout == "dense" and not torch.are_deterministic_algorithms_enabled()
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if options.deterministic and free and learns:
            raise ValueError(
                f"{self.name}: `deterministic=True` needs torch.use_deterministic_algorithms(True)"
            )
        if kernels.slopes is not None and options.slopes is not None:
            more[kernels.slopes] = options.slopes
        function = getattr(kernels.loaded(__package__ or ""), kernels.name)
        if options.with_lse:
            out, lse = function(*tensors, scale=options.scale, return_lse=True, **more)
            return out, lse
        return function(*tensors, scale=options.scale, **more), None

    def _turned(
        self,
        kernels: Kernels,
        options: Options,
        tensors: tuple[Tensor, Tensor, Tensor],
        **more: Tensor,
    ) -> Results:
        """Call the function of the kernels with [B, S, H, D] tensors. Nothing is copied."""
        turned = tuple(x.transpose(1, 2) for x in tensors)
        out, lse = self._run(kernels, options, turned, **more)
        return out.transpose(1, 2), lse

    def _with_new(
        self, lengths: int | Tensor | None, new: tuple[Tensor | None, Tensor | None]
    ) -> int | Tensor | None:
        """Return the numbers of keys with the new ones."""
        k, v = new
        if k is None and v is None:
            return lengths
        if k is None or v is None or lengths is None:
            raise ValueError(f"{self.name}: pass `k`, `v` and `cache_seqlens` together")
        return lengths + k.shape[1]

    def _for_cache(
        self,
        options: Options,
        tensors: tuple[Tensor, Tensor, Tensor],
        total: int | Tensor | None,
        block_table: Tensor | None,
    ) -> tuple[Kernels, int]:
        """Return the kernels for a cache, and the largest number of keys."""
        q, k_cache, _ = tensors
        size = k_cache.shape[1]
        if block_table is None:
            call = replace(_call("cache", options, *tensors), queries=q.shape[1], keys=size)
        else:
            call = replace(_call("pages", options, *tensors), page=size)
            call = replace(call, queries=q.shape[1], keys=size * block_table.shape[1])
        keys = total if isinstance(total, int) else call.keys
        whole = None
        if block_table is None and not isinstance(total, Tensor):  # all sequences have one length
            whole = chosen(self.table, replace(call, layout="dense", keys=keys))
        return whole or self._chosen(options, call), keys


def _write(
    cache: Tensor, new: Tensor | None, lengths: int | Tensor | None, block_table: Tensor | None
) -> None:
    """Write new keys or values behind those in a cache."""
    if new is None or lengths is None:
        return
    after = torch.arange(new.shape[1], device=new.device)
    rows: Tensor = torch.arange(len(new), device=new.device)[:, None]
    at = (lengths if isinstance(lengths, int) else lengths[:, None]) + after.expand(len(new), -1)
    if block_table is not None:
        size = cache.shape[1]
        rows, at = block_table.gather(1, (at // size).long()).long(), at % size
    cache[rows, at] = new


def _call(layout: str, options: Options, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """Return the description of a call, without its lengths."""
    before, after = options.window
    left, right = bounds(before, after, options.causal)
    head = (q.shape[-1], v.shape[-1])
    axes = options.slopes.dim() if options.slopes is not None else 0
    return Call(
        layout=layout,
        dtype=q.dtype,
        head=head,
        heads=q.shape[-2],
        kv_heads=k.shape[-2],
        queries=0,
        keys=0,
        left=left,
        right=right,
        softcap=options.softcap,
        slope_axes=axes,
    )
