"""KV caches as in a server: sequences of very different lengths, and unordered pages."""

from __future__ import annotations

import torch
from torch import Tensor

SPARE = 3
"""Number of unused pages in the pool. They hold NaN."""
NO_PAGE = 2**30
"""Entry of the block table past a sequence's last page: reading this page faults."""


def lengths(batch: int, sk: int, turn: int) -> Tensor:
    """Return keys per sequence, [B] int32, in a cycle: not a multiple of a tile, all, none, all but
    one, one.

    `turn` selects the start of the cycle, so any sequence may be the longest. One sequence has all
    keys.
    """
    some = (sk // 3 + 1, sk, 0, max(0, sk - 1), 1)
    found = (
        [min(sk, some[(b + turn) % len(some)]) for b in range(batch)] if batch > 1 else [sk] * batch
    )
    return torch.tensor(found, dtype=torch.int32)


def beyond(lens: Tensor, sk: int) -> Tensor:
    """Return the keys past the end of each sequence, bool [B, 1, SK]."""
    return (torch.arange(sk, device=lens.device)[None, :] >= lens[:, None])[:, None]


def share_first_page(x: Tensor, size: int) -> Tensor:
    """Return x [B, HKV, SK, D] with the same first page in all sequences, as with a common
    prompt.
    """
    x = x.clone()
    x[:, :, :size] = x[:1, :, :size]
    return x


def paged(x: Tensor, lens: Tensor, size: int, share: bool = False) -> tuple[Tensor, Tensor]:
    """Convert x [B, HKV, SK, D] to a pool [pages, size, HKV, D] and a block table [B, n] int32.

    Pages are in random order. Unused pages and the rest of last pages are NaN. With `share`, all
    sequences with a whole first page use the same one.
    """
    batch, heads, sk, width = x.shape
    n = -(-sk // size)
    order = torch.randperm(batch * n + SPARE, generator=torch.Generator().manual_seed(batch * n))
    table = order[: batch * n].view(batch, n)
    hidden = beyond(lens.to(x.device), n * size).expand(batch, heads, n * size)[..., None]
    rows = torch.nn.functional.pad(x, (0, 0, 0, n * size - sk)).masked_fill(hidden, torch.nan)
    pool = x.new_full((batch * n + SPARE, size, heads, width), torch.nan)
    pool[table.flatten().to(x.device)] = (
        rows.unflatten(2, (n, size)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    )
    table = table.masked_fill(torch.arange(n) * size >= lens[:, None], NO_PAGE)
    if share:
        whole = lens >= size
        table[whole, :1] = table[whole, :1][:1]
    return pool, table.to(torch.int32)
