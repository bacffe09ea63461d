"""KV caches as a server keeps them: sequences of very different lengths, and pages in no order."""

from __future__ import annotations

import torch
from torch import Tensor

SPARE = 3
"""Pages of the pool that no sequence has: they hold NaN."""
NO_PAGE = 2**30
"""What the block table says past a sequence's last page: an index that no kernel survives."""


def lengths(batch: int, sk: int, turn: int) -> Tensor:
    """Keys per sequence, [B] int32: some off any tile, all of them, none, all but one, one, and again.

    They begin at any of these, by the `turn`: which sequence is the longest says nothing. One sequence has all keys.
    """
    some = (sk // 3 + 1, sk, 0, max(0, sk - 1), 1)
    found = [min(sk, some[(b + turn) % len(some)]) for b in range(batch)] if batch > 1 else [sk] * batch
    return torch.tensor(found, dtype=torch.int32)


def beyond(lens: Tensor, sk: int) -> Tensor:
    """The keys [B, 1, SK] that a sequence does not have."""
    return (torch.arange(sk, device=lens.device)[None, :] >= lens[:, None])[:, None]


def share_first_page(x: Tensor, size: int) -> Tensor:
    """x [B, HKV, SK, D] with the same first page in all sequences, as after a common prompt."""
    x = x.clone()
    x[:, :, :size] = x[:1, :, :size]
    return x


def paged(x: Tensor, lens: Tensor, size: int, share: bool = False) -> tuple[Tensor, Tensor]:
    """x [B, HKV, SK, D] as a pool [pages, size, HKV, D] and a block table [B, n] int32.

    Pages lie in random order; the rest of a last page, and pages that nobody has, are NaN. With `share`, sequences
    whose first page is whole take that of the first of them.
    """
    batch, heads, sk, width = x.shape
    n = -(-sk // size)
    order = torch.randperm(batch * n + SPARE, generator=torch.Generator().manual_seed(batch * n))
    table = order[: batch * n].view(batch, n)
    hidden = beyond(lens.to(x.device), n * size).expand(batch, heads, n * size)[..., None]
    rows = torch.nn.functional.pad(x, (0, 0, 0, n * size - sk)).masked_fill(hidden, torch.nan)
    pool = x.new_full((batch * n + SPARE, size, heads, width), torch.nan)
    pool[table.flatten().to(x.device)] = rows.unflatten(2, (n, size)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    table = table.masked_fill(torch.arange(n) * size >= lens[:, None], NO_PAGE)
    if share:
        whole = lens >= size
        table[whole, :1] = table[whole, :1][:1]
    return pool, table.to(torch.int32)
