"""Calls of PyTorch's flash operators."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .covering import Call, bounds, regular


@dataclass(frozen=True)
class Asked:
    """The part of a call that forward and backward share.

    `heads` is the axis of heads: 1 for [B, H, S, D], 2 for [B, S, H, D], None for packed [T, H, D].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    heads: int | None
    left: int | None
    right: int | None
    scale: float
    cum_q: Tensor | None = None
    cum_k: Tensor | None = None
    max_q: int = 0
    max_k: int = 0

    @property
    def offsets(self) -> tuple[Tensor | None, ...]:
        """The offsets of packed sequences."""
        return (self.cum_q, self.cum_k) if self.heads is None else ()

    def call(self) -> Call | None:
        """Return the description of the call, or None if no kernels support its tensors."""
        tensors = (self.q, self.k, self.v)
        if self.q.dim() != (3 if self.heads is None else 4) or not 2**-126 <= self.scale <= 2**127:
            return None
        if not (
            _fit(*tensors) and all(_keeps_order(x.shape, x.stride(), self.heads) for x in tensors)
        ):
            return None
        return self._packed() if self.heads is None else self._dense(self.heads)

    def turned(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return tensors with the axes [B, H, S, D] of kernels, or back. Nothing is copied."""
        return tuple(x.transpose(1, 2) for x in tensors) if self.heads == 2 else tensors

    def _dense(self, heads: int) -> Call:
        q, k, v = self.q, self.k, self.v
        return Call(
            layout="dense",
            dtype=q.dtype,
            head=(q.shape[3], v.shape[3]),
            heads=q.shape[heads],
            kv_heads=k.shape[heads],
            queries=q.shape[3 - heads],
            keys=k.shape[3 - heads],
            left=self.left,
            right=self.right,
        )

    def _packed(self) -> Call | None:
        q, k, v, cum_q, cum_k = self.q, self.k, self.v, self.cum_q, self.cum_k
        if cum_q is None or cum_k is None or not _are_offsets(q.device, cum_q, cum_k):
            return None
        return Call(
            layout="packed",
            dtype=q.dtype,
            head=(q.shape[2], v.shape[2]),
            heads=q.shape[1],
            kv_heads=k.shape[1],
            queries=self.max_q,
            keys=self.max_k,
            left=self.left,
            right=self.right,
            square=cum_q.data_ptr() == cum_k.data_ptr(),
        )


@dataclass(frozen=True)
class Sdpa:
    """The arguments of `_scaled_dot_product_flash_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    dropout_p: float = 0.0
    is_causal: bool = False
    return_debug_mask: bool = False
    scale: float | None = None

    def asked(self) -> Asked | None:
        """Return the call, or None if it asks for more than attention."""
        if self.dropout_p or self.return_debug_mask:
            return None
        return _by_heads(self.query, self.key, self.value, self.is_causal, self.scale)


@dataclass(frozen=True)
class Backward:
    """The arguments that both backward operators begin with."""

    grad_out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    logsumexp: Tensor
    cum_seq_q: Tensor | None
    cum_seq_k: Tensor | None
    max_q: int
    max_k: int
    dropout_p: float
    is_causal: bool

    @property
    def plain(self) -> bool:
        """True if the call asks for nothing more than gradients of attention."""
        return not self.dropout_p and self.grad_out.dtype == self.query.dtype


@dataclass(frozen=True)
class SdpaBackward(Backward):
    """The arguments of `_scaled_dot_product_flash_attention_backward`."""

    philox_seed: Tensor | None
    philox_offset: Tensor | None
    scale: float | None = None

    def asked(self) -> Asked | None:
        """Return the call, or None if it asks for more than attention."""
        if not self.plain:
            return None
        return _by_heads(self.query, self.key, self.value, self.is_causal, self.scale)


@dataclass(frozen=True)
class Flash:
    """The arguments of `_flash_attention_forward`, which `varlen_attn` calls.

    torch 2.11 has no `block_table` and `num_splits`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    cum_seq_q: Tensor | None
    cum_seq_k: Tensor | None
    max_q: int
    max_k: int
    dropout_p: float
    is_causal: bool
    return_debug_mask: bool
    scale: float | None = None
    window_size_left: int | None = None
    window_size_right: int | None = None
    seqused_k: Tensor | None = None
    alibi_slopes: Tensor | None = None
    block_table: Tensor | None = None
    num_splits: int | None = None

    def asked(self) -> Asked | None:
        """Return the call, or None if it asks for more than attention."""
        more = (self.seqused_k, self.alibi_slopes, self.block_table, self.num_splits)
        if self.dropout_p or self.return_debug_mask or any(x is not None for x in more):
            return None
        return _by_offsets(self)


@dataclass(frozen=True)
class FlashBackward(Backward):
    """The arguments of `_flash_attention_backward`."""

    rng_state: Tensor | None
    unused: Tensor | None
    scale: float | None = None
    window_size_left: int | None = None
    window_size_right: int | None = None

    def asked(self) -> Asked | None:
        """Return the call, or None if it asks for more than attention."""
        return _by_offsets(self) if self.plain else None


def _by_heads(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Asked:
    return Asked(q, k, v, 1, *bounds(None, None, causal), _scale(q, scale))


def _by_offsets(one: Flash | FlashBackward) -> Asked | None:
    seen = bounds(one.window_size_left, one.window_size_right, one.is_causal)
    packed = one.cum_seq_q is not None
    return Asked(
        one.query,
        one.key,
        one.value,
        None if packed else 2,
        *seen,
        _scale(one.query, one.scale),
        one.cum_seq_q,
        one.cum_seq_k,
        one.max_q,
        one.max_k,
    )


def _scale(q: Tensor, scale: float | None) -> float:
    """Return the factor of q @ k^T, 0 for heads without columns."""
    return scale if scale is not None else q.shape[-1] ** -0.5 if q.shape[-1] else 0.0


def _fit(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if the tensors have one dtype and shapes that fit together."""
    if not (q.dtype == k.dtype == v.dtype and q.dim() == k.dim() == v.dim()):
        return False
    alike = k.shape[:-1] == v.shape[:-1] and q.shape[-1] == k.shape[-1]
    return alike and (q.dim() == 3 or len(q) == len(k)) and regular(q, k, v)


def _are_offsets(device: torch.device, cum_q: Tensor, cum_k: Tensor) -> bool:
    """True if kernels can read the offsets of packed sequences."""
    return (
        cum_q.shape == cum_k.shape
        and cum_q.dim() == 1
        and len(cum_q) > 1
        and all(
            x.dtype == torch.int32 and x.device == device and x.is_contiguous()
            for x in (cum_q, cum_k)
        )
    )


@functools.lru_cache(maxsize=4096)
def _keeps_order(shape: Any, strides: tuple[int, ...], heads: int | None) -> bool:
    """True if kernels allocate a result for this tensor as torch.empty_like does.

    PyTorch promises these strides, and torch.compile relies on them. Kernels allocate [T, H, D].
    For 4-d tensors, they allocate [B, H, S, D] or [B, S, H, D]: the order of the tensor's strides.
    """
    like = torch.empty_like(torch.empty_strided(shape, strides, device="meta"))
    order = list(range(len(shape)))
    if heads is not None and (heads == 1) == (strides[heads] < strides[3 - heads]):
        order = [0, 2, 1, 3]
    made = torch.empty([shape[axis] for axis in order], device="meta").permute(order)
    sizes = zip(shape, like.stride(), made.stride(), strict=True)
    return all(size == 1 or a == b for size, a, b in sizes)
