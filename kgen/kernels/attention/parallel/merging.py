"""The kernel that merges what parts of the keys give."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Put a part into a sum, in place: out [.., D] and lse [.., H, S] float32 of the sum, and those of the part.

    Tensors are [B, H, S, D], or [T, H, D] of packed sequences; lse is base-2, [B, H, S] or [H, T].
    """
    if out.dim() == 3:
        out, part = out.transpose(0, 1)[None], part.transpose(0, 1)[None]
        lse, part_lse = lse[None], part_lse[None]
    batch, heads, rows, columns = out.shape
    if not out.numel():
        return
    block = 16 if out.device.type == "cuda" else 256
    programs = -(-rows // block) * heads * batch
    with torch.cuda.device_of(out):
        _merge_kernel[(programs,)](
            out, lse, part, part_lse, *out.stride(), *lse.stride(), *part.stride(), *part_lse.stride(),
            heads, rows, D=columns, BLOCK_S=block, BLOCK_D=1 << (columns - 1).bit_length(), num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["H", "S"])  # type: ignore[untyped-decorator]
def _merge_kernel(  # type: ignore[no-untyped-def]
    out_ptr, lse_ptr, part_ptr, part_lse_ptr,
    stride_ob, stride_oh, stride_os, stride_od, stride_lb, stride_lh, stride_ls,
    stride_pb, stride_ph, stride_ps, stride_pd, stride_mb, stride_mh, stride_ms,
    H, S, D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(S, BLOCK_S)
    pid = tl.program_id(0)
    tile, head = pid % tiles, pid // tiles
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    s = (tile * BLOCK_S + tl.arange(0, BLOCK_S)).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    live = s < S
    both = live[:, None] & (d < D)[None, :]
    lse_rows = lse_ptr + b * stride_lb + h * stride_lh + s * stride_ls
    lse = tl.load(lse_rows, mask=live, other=float("-inf"))
    part_lse = tl.load(
        part_lse_ptr + b * stride_mb + h * stride_mh + s * stride_ms, mask=live, other=float("-inf")
    )
    most = tl.maximum(lse, part_lse)
    # A row without a key on either side stays as it is.
    most = tl.where(most == float("-inf"), 0.0, most)
    weight, part_weight = tl.exp2(lse - most), tl.exp2(part_lse - most)
    total = weight + part_weight
    some = tl.where(total == 0.0, 1.0, total)
    out_tile = out_ptr + b * stride_ob + h * stride_oh + s[:, None] * stride_os + d[None, :] * stride_od
    part_tile = part_ptr + b * stride_pb + h * stride_ph + s[:, None] * stride_ps + d[None, :] * stride_pd
    out = tl.load(out_tile, mask=both, other=0.0).to(tl.float32)
    part = tl.load(part_tile, mask=both, other=0.0).to(tl.float32)
    out = out * (weight / some)[:, None] + part * (part_weight / some)[:, None]
    tl.store(out_tile, out, mask=both)
    tl.store(lse_rows, most + tl.log2(total), mask=live)
