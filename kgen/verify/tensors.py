"""Tensors as a kernel may meet them: dtypes by their names in specs, and layouts that are hard to get right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

DTYPES: Mapping[str, Any] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
}

LAYOUTS = ("contiguous", "bshd", "guarded", "padded", "spaced", "offset", "stepped", "broadcast")


def arrange(values: Tensor, layout: str) -> Tensor:
    """The same values in a storage of another layout; what lies between and after the rows is poison.

    `contiguous`; `bshd`: dimensions 1 and 2 swapped in memory; `guarded`: poison after every row, every head
    and at both ends, nothing aligned; `padded`: the same, rows still 16-byte aligned; `spaced`: 8 elements of poison
    after every row, the first one aligned; `offset`: contiguous, one element off; `stepped`: every other element;
    `broadcast` and `expanded`: strides of 0 as they come.
    """
    if layout in ("broadcast", "expanded"):
        return values
    if layout == "contiguous" or values.ndim == 0:
        return values.contiguous()
    if layout == "bshd":
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    shape = list(values.shape)
    if layout == "offset":
        view = _poison((values.numel() + 2,), values)[1:-1].view(shape)
    elif layout == "spaced":
        view = _poison((*shape[:-1], shape[-1] + 8), values)[..., : shape[-1]]
    elif layout == "stepped":
        view = _poison((*shape[:-1], 2 * shape[-1]), values)[..., ::2]
    else:
        aligned = layout == "padded"
        grown = [n if i < len(shape) - 2 else n + (8 if aligned else 3) for i, n in enumerate(shape)]
        start = 8 if aligned else 1
        view = _poison(tuple(grown), values)
        for axis in range(max(0, len(shape) - 2), len(shape)):
            # Rows begin after poison too; an aligned layout keeps its rows aligned.
            view = view.narrow(axis, start if axis == len(shape) - 1 else 2, shape[axis])
    view.copy_(values)
    return view


def _poison(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """NaN, or an integer that no index survives or that has all bits, or True."""
    value: Any = (
        torch.nan if like.is_floating_point() else {torch.bool: True, torch.uint8: 255}.get(like.dtype, 2**30)
    )
    return torch.full(shape, value, dtype=like.dtype, device=like.device)
