"""Plans as users have them: shard tensors, gather them, and look up positions of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import Words
from .call_plans import Kernels, check, mask_of, reading, stands_for
from .groups import group_of, resolved
from .planning import Plan, chosen, encoded, planned, sharded, work
from .transfers import gathered


@dataclass(frozen=True)
class Layout:
    """The positions of each rank, and the keys that it needs from others.

    `numbers` encodes the plan as an int64 tensor, for operators.
    """

    plan: Plan
    sharding: str
    numbers: Tensor
    group: str | None
    work: tuple[int, ...]
    """Pairs of positions that the kernels of each rank visit, for one head."""
    packed: bool = False
    """True for packed sequences: tensors may have more rows after the last sequence."""

    def _rank(self, rank: int | None) -> int:
        if rank is not None:
            return rank
        group = resolved(self.group)
        if (size := dist.get_world_size(group)) != self.plan.ranks:
            raise ValueError(
                f"the plan is for {self.plan.ranks} ranks, the group has {size}: pass `rank`, or "
                "make the plan with "
                "this group as `ranks`"
            )
        return int(dist.get_rank(group))

    def shard(self, x: Tensor, dim: int, rank: int | None = None, keys: bool = False) -> Tensor:
        """Return the rows of a rank (default: this one) from a tensor with all rows along `dim`.

        `keys=True` shards by the plan of the keys. Rows after the last packed sequence are left
        out. Raises `ValueError` if the tensor has another number of rows than the plan.
        """
        side = self.plan.kv if keys else self.plan.q
        if x.shape[dim] < side.length or (x.shape[dim] > side.length and not self.packed):
            raise ValueError(
                f"expected {side.length} rows along dimension {dim}, got shape {list(x.shape)}"
            )
        parts = [x.narrow(dim, lo, hi - lo) for lo, hi in side.parts[self._rank(rank)]]
        return (
            torch.cat(parts, dim) if len(parts) > 1 else parts[0] if parts else x.narrow(dim, 0, 0)
        )

    def unshard(self, x: Tensor, dim: int, keys: bool = False) -> Tensor:
        """Gather all rows on every rank, from tensors with the rows of a rank along `dim`. It has
        no gradient.

        Raises `ValueError` on all ranks if one has another number of rows than the plan.
        """
        side, group = self.plan.kv if keys else self.plan.q, resolved(self.group)
        lengths = [side.local(rank) for rank in range(side.ranks)]
        rows = x.shape[dim]
        there = [
            n
            for n, _ in Words(group, x.device, (rows, rows, rows), {"unshard": (dim, keys)}).heard()
        ]
        if there != lengths:
            raise ValueError(f"expected {lengths} rows along dimension {dim}, by rank, got {there}")
        heard, _ = gathered(group, dim, x.detach(), lengths, async_op=False)
        return self.joined(heard, dim, keys)

    def joined(self, shards: Sequence[Tensor], dim: int, keys: bool = False) -> Tensor:
        """Return the whole tensor from the shards of all ranks."""
        side = self.plan.kv if keys else self.plan.q
        pieces = {}
        for rank, part in enumerate(side.parts):
            for lo, hi in part:
                first, last = side.rows(rank, lo, hi)
                pieces[lo] = shards[rank].narrow(dim, first, last - first)
        return torch.cat([pieces[lo] for lo in sorted(pieces)], dim)

    def positions(self, device: Any = None, rank: int | None = None) -> Tensor:
        """Return the position of each row of a rank (default: this one), [S] int64, for rotary
        embeddings.
        """
        runs = [
            torch.arange(lo, hi, device=device) for lo, hi in self.plan.q.parts[self._rank(rank)]
        ]
        return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64, device=device)


def laid_out(
    kernels: Kernels,
    lengths: tuple[int, int],
    given: dict[str, Any],
    sizes: tuple[int, int, int],
    ranks: Any,
    sharding: str,
) -> Layout:
    """Plan a call over ranks.

    lengths: numbers of queries and keys. given: buffers and numbers that the mask reads, by name.
    sizes: sequences, heads, and heads of keys. ranks: a number, a process group, a DeviceMesh, or
    None for all ranks. sharding: a name.

    Raises `ValueError` for an unknown sharding, and for an invalid length, size or number of ranks.
    """
    if min(lengths) < 0 or min(sizes) < 1 or (isinstance(ranks, int) and ranks < 1):
        raise ValueError(
            f"lengths must be at least 0, sizes and ranks at least 1, got {lengths}, {sizes} and "
            f"{ranks}"
        )
    number, group = (ranks, None) if type(ranks) is int else (None, group_of(ranks))
    number = dist.get_world_size(resolved(group)) if number is None else number
    check(kernels, lengths, given)
    with reading(kernels):
        mask = mask_of(kernels, given, lengths, *sizes)
        if sharding != "auto":
            q = sharded(sharding, mask, lengths[0], number)
        elif lengths[0] == lengths[1]:
            sharding, q = chosen(mask, lengths[0], number)
        else:
            sharding = "contiguous"
            q = sharded(sharding, mask, lengths[0], number)
        kv = q if lengths[0] == lengths[1] else sharded("contiguous", mask, lengths[1], number)
        plan = replace(planned(q, kv, mask), of=stands_for(kernels, given, sizes))
        counted = tuple(sum(work(mask, lengths[1], *run) for run in part) for part in q.parts)
    numbers = torch.tensor(encoded(plan), dtype=torch.int64)
    return Layout(plan, sharding, numbers, group, counted, kernels.packed)


# --- DTensors ------------------------


def local(
    q: Any, k: Any, v: Any, dim: int, plan: Layout | None, group: Any
) -> tuple[str, Tensor, Tensor, Tensor, Callable[[Tensor], Any]]:
    """Return the group of a call, its local q, k and v, and a function that converts the local
    result.

    The function returns a DTensor if q, k and v are DTensors.

    Raises:
        ValueError: DTensors are not sharded along positions over one mesh dimension, or the plan
            does not fit them.
        TypeError: `plan` is not a `Layout`.
    """
    from torch.distributed.tensor import DTensor, Partial, Shard

    if plan is not None and not isinstance(plan, Layout):
        raise TypeError(
            "plan must be a Layout, the result of the package's plan function, got "
            f"{type(plan).__name__}"
        )
    if not any(isinstance(x, DTensor) for x in (q, k, v)):
        name = (
            plan.group
            if group is None and plan is not None and plan.group is not None
            else group_of(group)
        )
        return name, q, k, v, lambda out: out
    placed = [getattr(x, "placements", None) for x in (q, k, v)]
    over = [i for i, placement in enumerate(placed[0] or ()) if placement == Shard(dim)]
    partial = any(isinstance(placement, Partial) for placement in placed[0] or ())
    if len(over) != 1 or partial or placed[1] != placed[0] or placed[2] != placed[0]:
        said = [getattr(x, "placements", "no DTensor") for x in (q, k, v)]
        raise ValueError(
            "DTensors q, k and v must be sharded alike, over one mesh dimension along dimension "
            f"{dim}, got {said}"
        )
    if plan is not None and any(
        len(part) > 1 for side in (plan.plan.q, plan.plan.kv) for part in side.joined.parts
    ):
        raise ValueError(
            f"DTensors need a plan with one run of positions per rank, got {plan.sharding}: use "
            "contiguous"
        )
    mesh, placements = q.device_mesh, q.placements
    shape = torch.Size((*q.shape[:-1], v.shape[-1]))
    strides = tuple(shape[i + 1 :].numel() for i in range(len(shape)))
    name = str(mesh.get_group(over[0]).group_name)
    return (
        name,
        *(x.to_local() for x in (q, k, v)),
        lambda out: DTensor.from_local(
            out.contiguous(), mesh, placements, run_check=False, shape=shape, stride=strides
        ),
    )
