"""KV caches as a server keeps them: sequences of very different lengths, and pages in no order."""

from __future__ import annotations

import torch
from torch import Tensor

SPARE = 3
"""Pages of the pool that no sequence has: they hold NaN."""
NO_PAGE = 2**30
"""What the block table says past a sequence's last page: an index that no kernel survives."""


def lengths(batch: int, sk: int) -> Tensor:
    """Keys per sequence, [B] int32: all of them, some off any tile, none, one, and again."""
    some = (sk, sk // 3 + 1, 0, 1, max(0, sk - 1))
    return torch.tensor([min(sk, some[b % len(some)]) for b in range(batch)], dtype=torch.int32)


def beyond(lens: Tensor, sk: int) -> Tensor:
    """The keys [B, 1, SK] that a sequence does not have."""
    return (torch.arange(sk, device=lens.device)[None, :] >= lens[:, None])[:, None]


def share_first_page(x: Tensor, size: int) -> Tensor:
    """x [B, HKV, SK, D] with the same first page in all sequences, as after a common prompt."""
    x = x.clone()
    x[:, :, :size] = x[:1, :, :size]
    return x


def paged(x: Tensor, lens: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """x [B, HKV, SK, D] as a pool [pages, size, HKV, D] and a block table [B, n] int32.

    Pages lie in random order, the first one belongs to every sequence that has a whole one, the rest of a last page,
    and pages that nobody has, are NaN.
    """
    batch, heads, sk, width = x.shape
    n = -(-sk // size)
    order = torch.randperm(batch * n + SPARE, generator=torch.Generator().manual_seed(batch * n))
    table = order[: batch * n].view(batch, n).to(torch.int32)
    pool = torch.full((batch * n + SPARE, size, heads, width), torch.nan, dtype=x.dtype)
    for b in range(batch):
        for i in range(n):
            if int(lens[b]) <= i * size:
                table[b, i] = NO_PAGE
                continue
            rows = x[b, :, i * size : min((i + 1) * size, int(lens[b]))]
            pool[table[b, i], : rows.shape[1]] = rows.transpose(0, 1)
            if i == 0 and int(lens[b]) >= size and int(lens[0]) >= size:
                table[b, 0] = table[0, 0]
    return pool, table
