"""Test tensors: dtypes by their names in specs, and difficult memory layouts."""

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

LAYOUTS = (
    *(
        "contiguous",
        "bshd",
        "guarded",
        "padded",
        "spaced",
        "offset",
        "stepped",
        "broadcast",
        "mixed",
    ),
    *("odd-0", "odd-1", "odd-2"),
)


def arrange(values: Tensor, layout: str, place: int = 0) -> Tensor:
    """Return the values in another memory layout, with poison between and after the rows.

    `contiguous`: as in PyTorch.
    `bshd`: dimensions 1 and 2 are swapped in memory.
    `guarded`: poison after every row and head and at both ends; nothing is aligned.
    `padded`: as `guarded`, with rows aligned to 16 bytes.
    `spaced`: poison after every row; the first row is aligned.
    `offset`: contiguous, not aligned.
    `stepped`: elements are not adjacent.
    `mixed`: `bshd` and `spaced` alternate between operands.
    `broadcast`, `expanded`: unchanged, with strides of 0.
    `odd-1`: the stride of dimension 1 is not aligned for operand 1; other operands are `spaced`.

    `place` is the index of the operand in its call. Each operand of a call has its own strides and
    offset, so a kernel that uses the strides of another operand fails.
    """
    if layout in ("broadcast", "expanded"):
        return values
    if layout == "contiguous" or values.ndim == 0:
        return values.contiguous()
    if layout == f"odd-{place}":
        return _odd(values, place % (values.ndim - 1))
    if layout == "mixed":
        layout = ("bshd", "spaced")[place % 2]
    if layout.startswith("odd-"):
        layout = "spaced"
    shape = list(values.shape)
    if layout == "bshd":
        # As in a projection that also has the heads of other operands.
        shape[1], shape[2] = shape[2], shape[1] + place
        view = _poison(tuple(shape), values).transpose(1, 2)[:, : values.shape[1]]
    elif layout == "offset":
        end = 1 + 2 * place
        view = _poison((values.numel() + 2 * end,), values)[end:-end].view(shape)
    elif layout == "spaced":
        view = _poison((*shape[:-1], shape[-1] + 8 * (1 + place)), values)[..., : shape[-1]]
    elif layout == "stepped":
        step = 2 + place
        view = _poison((*shape[:-1], step * shape[-1]), values)[..., ::step]
    else:
        step, start = (8, 8) if layout == "padded" else (2, 1)
        # Poison before rows, too. An aligned layout keeps its rows aligned.
        extra = [(0, 0)] * len(shape)
        extra[-1] = (start, step * (1 + place))
        if len(shape) > 1:
            extra[-2] = (2, 1 + place)
        if len(shape) > 2:
            extra[-3] = (0, place)
        grown = (n + before + after for n, (before, after) in zip(shape, extra, strict=True))
        view = _poison(tuple(grown), values)
        for axis, (before, _) in enumerate(extra):
            view = view.narrow(axis, before, shape[axis])
    view.copy_(values)
    return view


def _odd(values: Tensor, axis: int) -> Tensor:
    """Return the values with an odd stride in one dimension.

    Other strides are multiples of 16 bytes.
    """
    strides, step = [1], values.shape[-1]
    for dim in range(values.ndim - 2, -1, -1):
        strides.insert(0, -(-step // 16) * 16 + (1 if dim == axis else 0))
        step = strides[0] * values.shape[dim]
    return _poison((step,), values).as_strided(values.shape, strides).copy_(values)


def _poison(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return NaN, an integer that is invalid as an index or has all bits set, or True."""
    value: Any = (
        torch.nan
        if like.is_floating_point()
        else {torch.bool: True, torch.uint8: 255}.get(like.dtype, 2**30)
    )
    return torch.full(shape, value, dtype=like.dtype, device=like.device)
