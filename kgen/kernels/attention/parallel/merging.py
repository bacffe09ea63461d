"""The kernel that merges parts: it sums them, or combines outputs by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

SMALL = 2**21
"""Number of elements up to which PyTorch's copy or addition is faster than launching a Triton
kernel.
"""


def merge(
    out: Tensor, parts: Sequence[Tensor], lse: Tensor | None = None, lses: Sequence[Tensor] = ()
) -> None:
    """Write the sum of parts into `out`. With `lses`, write the output over all their keys, and its
    `lse`.

    out, parts: [B, H, S, D], or [T, H, D] for packed sequences, with contiguous columns.
    lse, lses: base-2 log-sum-exps, [B, H, S] or [H, T], float32 or float64.

    Sums are in float32. `out` and `lse` may be the first part and its log-sum-exp.
    """
    if not lses and out.numel() <= SMALL and len(parts) == 1:
        out.copy_(parts[0])
        return
    if not lses and out.numel() <= SMALL and [x.dtype for x in parts] == [out.dtype] * 2:
        torch.add(*parts, out=out)
        return
    if out.dim() == 3:
        out, *parts = (x.transpose(0, 1)[None] for x in (out, *parts))
        lse, *lses = (x if x is None else x[None] for x in (lse, *lses))
    batch, heads, rows, columns = out.shape
    if not out.numel():
        return
    wide = 1 << (columns - 1).bit_length()
    block = max(16, 4096 // wide) if out.device.type == "cuda" else 256
    with torch.cuda.device_of(out):
        _merge_kernel[(-(-rows // block) * heads * batch,)](
            (out, out.stride()), (tuple(parts), tuple(x.stride() for x in parts)),
            (
                (lse, lse.stride() if lse is not None else ()),
                (tuple(lses), tuple(x.stride() for x in lses)),
            ),
            heads, rows, D=columns, BLOCK_S=block, BLOCK_D=wide, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["H", "S"])  # type: ignore[untyped-decorator]
def _merge_kernel(  # type: ignore[no-untyped-def]
    out, parts, logs, H, S, D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merge tiles of BLOCK_S rows.

    Pointers come with their strides; `logs` has those of `lse` and of `lses`.
    """
    out_ptr, out_strides = out
    parts, strides = parts
    lse_ptr, lse_out_strides = logs[0]
    lses, lse_strides = logs[1]
    tiles = tl.cdiv(S, BLOCK_S)
    pid = tl.program_id(0)
    tile, head = pid % tiles, pid // tiles
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    s = (tile * BLOCK_S + tl.arange(0, BLOCK_S)).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    live = s < S
    both = live[:, None] & (d < D)[None, :]
    if len(lses):
        most = tl.full((BLOCK_S,), float("-inf"), lse_ptr.dtype.element_ty)
        for i in tl.static_range(len(lses)):
            most = tl.maximum(
                most,
                tl.load(_rows(lses[i], lse_strides[i], b, h, s), mask=live, other=float("-inf")),
            )
        # A row without a key in any part has no output.
        most = tl.where(most == float("-inf"), 0.0, most)
        total = tl.zeros((BLOCK_S,), tl.float32)
        for i in tl.static_range(len(lses)):
            lse = tl.load(_rows(lses[i], lse_strides[i], b, h, s), mask=live, other=float("-inf"))
            total += tl.exp2((lse - most).to(tl.float32))
        some = tl.where(total == 0.0, 1.0, total)
    out = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    for i in tl.static_range(len(parts)):
        part = tl.load(
            _rows(parts[i], strides[i], b, h, s)[:, None] + d[None, :], mask=both, other=0.0
        )
        if len(lses):
            lse = tl.load(_rows(lses[i], lse_strides[i], b, h, s), mask=live, other=float("-inf"))
            out += part.to(tl.float32) * (tl.exp2((lse - most).to(tl.float32)) / some)[:, None]
        else:
            out += part.to(tl.float32)
    # All parts are read: `out` may be one of them.
    tl.store(_rows(out_ptr, out_strides, b, h, s)[:, None] + d[None, :], out, mask=both)
    if len(lses):
        tl.store(_rows(lse_ptr, lse_out_strides, b, h, s), most + tl.log2(total), mask=live)


@triton.jit
def _rows(pointer, strides, b, h, s):  # type: ignore[no-untyped-def]
    return pointer + b * strides[0] + h * strides[1] + s * strides[2]
