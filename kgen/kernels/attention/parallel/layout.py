"""The positions of each rank: functions to shard tensors, to gather them, and to look up positions of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import Words
from .planning import Plan, chosen, encoded, planned, sharded, work
from .runtime import Kernels, check, mask_of, reading, stands_for
from .transfers import gathered


@dataclass(frozen=True)
class Layout:
    """The positions of each rank, and which keys each needs of the others. `numbers` is what operators take."""

    plan: Plan
    sharding: str
    numbers: Tensor
    group: str | None
    work: tuple[int, ...]
    """Pairs that kernels look at, by rank, of one head."""
    packed: bool = False
    """Whether sequences lie end to end: then there may be rows behind the last."""

    def _rank(self, rank: int | None) -> int:
        if rank is not None:
            return rank
        group = _group(self.group)
        if (size := dist.get_world_size(group)) != self.plan.ranks:
            raise ValueError(
                f"the plan is for {self.plan.ranks} ranks, and the group has {size}: pass `rank`, or make it with "
                "`ranks=` that group"
            )
        return int(dist.get_rank(group))

    def shard(self, x: Tensor, dim: int, rank: int | None = None, keys: bool = False) -> Tensor:
        """The rows of a rank, this one by default, of a tensor that has all of them along `dim`. Of packed sequences
        those behind the last are left out. Raises `ValueError` for a tensor that has others."""
        side = self.plan.kv if keys else self.plan.q
        if x.shape[dim] < side.length or (x.shape[dim] > side.length and not self.packed):
            raise ValueError(f"the plan is of {side.length} rows along dimension {dim}, got {list(x.shape)}")
        parts = [x.narrow(dim, lo, hi - lo) for lo, hi in side.parts[self._rank(rank)]]
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0] if parts else x.narrow(dim, 0, 0)

    def unshard(self, x: Tensor, dim: int, keys: bool = False) -> Tensor:
        """All rows, on each rank, of tensors that have those of a rank along `dim`. It has no gradient. Raises
        `ValueError` on all ranks where one has other rows than the plan."""
        side, group = self.plan.kv if keys else self.plan.q, _group(self.group)
        lengths = [side.local(rank) for rank in range(side.ranks)]
        rows = x.shape[dim]
        there = [n for n, _ in Words(group, x.device, (rows, rows, rows), {"unsharded": (dim, keys)}).heard()]
        if there != lengths:
            raise ValueError(
                f"the plan is of {lengths} rows along dimension {dim}, by rank, and there are {there}"
            )
        heard, _ = gathered(group, dim, x.detach(), lengths, async_op=False)
        return self.joined(heard, dim, keys)

    def joined(self, shards: Sequence[Tensor], dim: int, keys: bool = False) -> Tensor:
        """All rows, of the shards of all ranks."""
        side = self.plan.kv if keys else self.plan.q
        pieces = {}
        for rank, part in enumerate(side.parts):
            for lo, hi in part:
                first, last = side.rows(rank, lo, hi)
                pieces[lo] = shards[rank].narrow(dim, first, last - first)
        return torch.cat([pieces[lo] for lo in sorted(pieces)], dim)

    def positions(self, device: Any = None, rank: int | None = None) -> Tensor:
        """[S] int64: where the rows of a rank stand, as rotary embeddings want to know."""
        runs = [torch.arange(lo, hi, device=device) for lo, hi in self.plan.q.parts[self._rank(rank)]]
        return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64, device=device)


def laid_out(
    kernels: Kernels,
    lengths: tuple[int, int],
    given: dict[str, Any],
    sizes: tuple[int, int, int],
    ranks: Any,
    sharding: str,
) -> Layout:
    """The layout of a mask over ranks; `sizes` are sequences, heads, and heads of keys. Raises `ValueError` for a
    sharding, a length or a number of ranks that is none."""
    if min(lengths) < 0 or min(sizes) < 1 or (isinstance(ranks, int) and ranks < 1):
        raise ValueError(f"there is no plan of lengths {lengths}, sizes {sizes} and ranks {ranks}")
    number, group = (ranks, None) if type(ranks) is int else (None, group_of(ranks))
    number = dist.get_world_size(_group(group)) if number is None else number
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


# --- groups ------------------------


def group_of(group: Any) -> str:
    """The name of a process group, or of that of a DeviceMesh of one dimension; by default of all ranks. Raises
    `TypeError` for anything else."""
    if group is None:
        group = dist.group.WORLD
    elif not isinstance(group, dist.ProcessGroup):
        if not hasattr(group, "get_group"):
            raise TypeError(f"there is a process group or a DeviceMesh to name, got {group!r}")
        group = group.get_group()
    if group is None:
        raise ValueError("there is no process group: call torch.distributed.init_process_group first")
    return str(group.group_name)


def _group(name: str | None) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(group_of(None) if name is None else name)


def local(
    q: Any, k: Any, v: Any, dim: int, plan: Layout | None, group: Any
) -> tuple[str, Tensor, Tensor, Tensor, Callable[[Tensor], Any]]:
    """The group of a call, its tensors on this rank, and what makes of the result what the arguments are.

    Raises `ValueError` for DTensors that are not sharded along positions over one dimension of their mesh, and
    `TypeError` for a plan that is none.
    """
    from torch.distributed.tensor import DTensor, Partial, Shard

    if plan is not None and not isinstance(plan, Layout):
        raise TypeError(f"plan must be what the function that makes plans gives, got {type(plan).__name__}")
    if not any(isinstance(x, DTensor) for x in (q, k, v)):
        name = (
            plan.group if group is None and plan is not None and plan.group is not None else group_of(group)
        )
        return name, q, k, v, lambda out: out
    placed = [getattr(x, "placements", None) for x in (q, k, v)]
    over = [i for i, placement in enumerate(placed[0] or ()) if placement == Shard(dim)]
    partial = any(isinstance(placement, Partial) for placement in placed[0] or ())
    if len(over) != 1 or partial or placed[1] != placed[0] or placed[2] != placed[0]:
        said = [getattr(x, "placements", "no DTensor") for x in (q, k, v)]
        raise ValueError(
            f"DTensors of q, k and v must be sharded alike, and along dimension {dim} once, got {said}"
        )
    if plan is not None and any(
        len(part) > 1 for side in (plan.plan.q, plan.plan.kv) for part in side.joined.parts
    ):
        raise ValueError(f"DTensors have a run of positions on each rank, and the plan is {plan.sharding}")
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
