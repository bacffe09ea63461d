"""The mask of a workload as intervals of keys, for libraries that take intervals or a window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kgen.bench.peers import DoesNotApply
from kgen.expr.nodes import variables
from kgen.kernels.attention.bench.workload import Workload
from kgen.verify.evaluate import evaluate

MOST = 32
"""Largest number of intervals per query. Dilated masks have one interval per key."""
ROWS = 1024
"""Rows of queries whose mask is evaluated at once."""


@dataclass(frozen=True)
class Window:
    """A mask of a single interval: keys from `query - left` to `query + right`.

    None means no bound on that side.
    """

    left: int | None
    right: int | None

    @property
    def causal(self) -> bool:
        """True for a causal mask without a window."""
        return self.left is None and self.right == 0


def intervals(workload: Workload) -> Tensor:
    """Return the ends of the intervals of keys that each query sees.

    The result is int32 [1 or HQ, 1 or B, SQ, N, 2]: the first key of an interval, and the first key
    after it. Intervals are sorted. Rows with fewer than N intervals end with empty ones at SK.
    Raise `DoesNotApply` for more than `MOST` intervals.
    """
    size, mask_mod = workload.sizes, workload.problem.mask_mod
    used = variables(mask_mod) if mask_mod is not None else frozenset[str]()
    batches, heads = (size["B"] if "b" in used else 1), (size["HQ"] if "h" in used else 1)
    parts = [torch.cat([*_rows(workload, b, h)]) for h in range(heads) for b in range(batches)]
    most = max(part.shape[1] for part in parts)
    padded = [torch.nn.functional.pad(p, (0, most - p.shape[1]), value=size["SK"]) for p in parts]
    return torch.stack(padded).view(heads, batches, size["SQ"], most // 2, 2)


def _rows(workload: Workload, b: int, h: int) -> Iterator[Tensor]:
    """Yield the ends of the intervals of a batch entry and head, [rows, 2 N]."""
    size, mask_mod, device = workload.sizes, workload.problem.mask_mod, workload.q.device
    keys = size["SK"]
    if mask_mod is None:
        whole = torch.tensor([0, keys], dtype=torch.int32, device=device)
        yield whole.expand(size["SQ"], 2)
        return
    env: dict[str, Any] = {**size, **workload.params, **workload.buffers, "inf": torch.inf}
    env |= {"b": b, "h": h, "kv_idx": torch.arange(keys, device=device)[None, :]}
    places = torch.arange(keys + 1, dtype=torch.int32, device=device)
    found = []
    for start in range(0, size["SQ"], ROWS):
        rows = torch.arange(start, min(start + ROWS, size["SQ"]), device=device)[:, None]
        seen = evaluate(mask_mod, env | {"q_idx": workload.first + rows}, torch)
        around = torch.nn.functional.pad(seen.expand(len(rows), keys), (1, 1))
        ends = around[:, 1:] != around[:, :-1]
        if (number := int(ends.sum(1).max())) > 2 * MOST:
            raise DoesNotApply
        own = torch.where(ends, places, keys)
        found.append(own.topk(max(2, number), 1, largest=False, sorted=True).values)
    most = max(part.shape[1] for part in found)
    for part in found:
        yield torch.nn.functional.pad(part, (0, most - part.shape[1]), value=keys)


def window(workload: Workload) -> Window:
    """Return the window that is equal to the mask. Raise `DoesNotApply` if there is none."""
    size = workload.sizes
    ends = intervals(workload)
    if ends.shape[:2] != (1, 1) or ends.shape[3] != 1 or size["SQ"] != size["SK"]:
        raise DoesNotApply
    first, after = ends[0, 0, :, 0].long().unbind(-1)
    queries = torch.arange(size["SQ"], device=first.device)
    left = None if not first.any() else int(queries[-1] - first[-1])
    right = None if (after == size["SK"]).all() else int(after[0]) - 1
    lowest = first.new_zeros(()) if left is None else (queries - left).clamp(min=0)
    highest = size["SK"] if right is None else (queries + right + 1).clamp(max=size["SK"])
    if not bool(((first == lowest) & (after == highest)).all()):
        raise DoesNotApply
    return Window(left, right)
