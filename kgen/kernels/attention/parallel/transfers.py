"""Transfers between ranks, and the order of computations that overlap with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .partial_sums import run_of
from .planning import Plan
from .sharding import Interval


@dataclass(frozen=True)
class Keys:
    """Keys and values of this rank, with positions along `axis`, the plan and the process group."""

    plan: Plan
    group: dist.ProcessGroup
    axis: int
    k: Tensor
    v: Tensor

    @functools.cached_property
    def rank(self) -> int:
        """Rank of this process in the group."""
        rank: int = dist.get_rank(self.group)
        return rank

    @functools.cached_property
    def kind(self) -> tuple[Any, ...]:
        """The shapes and dtypes that, with the plan, determine the layout of buffers."""
        return self.axis, *((rows_first(x, self.axis, 1), x.dtype) for x in (self.k, self.v))

    @property
    def others(self) -> list[int]:
        """All ranks except this one."""
        return [other for other in range(self.plan.ranks) if other != self.rank]

    def own(self, interval: Interval) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a run of positions of this rank."""
        rows = self.plan.kv.rows(self.rank, *interval)
        return run_of(self.k, self.axis, rows), run_of(self.v, self.axis, rows)

    def empty(self, interval: Interval) -> tuple[Tensor, Tensor]:
        """Return uninitialized tensors for the keys and values of a run of positions of another
        rank.
        """
        length = interval[1] - interval[0]
        return like(self.k, self.axis, length), like(self.v, self.axis, length)


Made = TypeVar("Made")


def kept_with_plan(make: Callable[..., Made]) -> Callable[..., Made]:
    """Cache the results of a function of keys and integers with their plan."""

    @functools.wraps(make)
    def found(keys: Keys, *numbers: int) -> Made:
        kept, key = keys.plan.kept, (make.__name__, keys.kind, numbers)
        if key not in kept:
            kept[key] = make(keys, *numbers)
        result: Made = kept[key]
        return result

    return found


def exchanged(
    group: dist.ProcessGroup, sent: list[tuple[int, Tensor]], received: list[tuple[int, Tensor]]
) -> list[Any]:
    """Start transfers of tensors to ranks and from ranks, and return their work objects."""
    ops = []
    for do, tensors in ((dist.isend, sent), (dist.irecv, received)):
        for rank, x in tensors:
            if x.numel():
                ops.append(dist.P2POp(do, x, dist.get_global_rank(group, rank), group))
    works: list[Any] = dist.batch_isend_irecv(ops) if ops else []
    return works


def gathered(
    group: dist.ProcessGroup, axis: int, x: Tensor, lengths: list[int], async_op: bool = True
) -> tuple[list[Tensor], Any]:
    """Gather the rows of all ranks along an axis. Returns the tensors by rank, and the work to wait
    for.

    `lengths` has the number of rows of each rank.
    """
    longest = max(lengths)
    if x.shape[axis] == longest:
        own = x.contiguous()
    else:  # all_gather needs equal sizes
        own = like(x, axis, longest)
        run_of(own, axis, (0, x.shape[axis])).copy_(x)
    there = [like(x, axis, longest) for _ in lengths]
    work = dist.all_gather(there, own, group=group, async_op=async_op)
    return [
        run_of(one, axis, (0, length)) for one, length in zip(there, lengths, strict=True)
    ], work


# --- empty tensors ------------------------


def like(x: Tensor, axis: int, length: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialized tensor with the shape of `x`, but this length along `axis`."""
    shape = [*x.shape]
    shape[axis] = length
    return x.new_empty(shape, dtype=dtype)


def empty_rows_first(x: Tensor, axis: int, length: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialized tensor of rows like those of `x`, rows first: any run of them is
    contiguous.
    """
    return x.new_empty(rows_first(x, axis, length), dtype=dtype)


def rows_first(x: Tensor, axis: int, length: int) -> tuple[int, ...]:
    """Return the shape of `length` rows of `x`, with their axis first."""
    return length, *x.shape[:axis], *x.shape[axis + 1 :]


# --- transfers that overlap with computation ------------------------

LEAD = 20_000
"""GPU cycles, about ten microseconds, in which an NCCL kernel starts."""


class Beside:
    """Transfers on a stream of their own, and their order with the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.apart = device, device.type == "cuda"
        self.under_way: list[list[Any]] = []
        self.at_end: list[Any] = []
        self.here: torch.cuda.Stream | None = None
        self.beside: torch.cuda.Stream | None = None

    def in_line(self) -> None:
        """Use the compute stream for transfers, because they are short."""
        self.apart = False

    def begin(self) -> None:
        """Let later transfers wait for the work that the compute stream has so far."""
        if self.apart:
            self.here, self.beside = (
                torch.cuda.current_stream(self.device.index),
                _stream_beside(self.device),
            )
            self.beside.wait_stream(self.here)

    def stream(self) -> AbstractContextManager[object]:
        """Return a context with the transfer stream as the current stream."""
        return nullcontext() if self.beside is None else torch.cuda.stream(self.beside)

    def wait(self, works: list[Any] | None = None, received: Sequence[Tensor] = ()) -> None:
        """Let the compute stream wait for these transfers. Then give other running transfers time
        to start.

        A kernel that occupies all multiprocessors blocks a transfer that becomes ready at the same
        time.
        """
        if self.here is None or self.beside is None:
            over(works or [])
            return
        if not any(self.under_way):
            return
        # their memory belongs to this stream: it must not be reused before they end
        with self.stream():
            over(works or [])
            if any(self.under_way):
                torch.cuda._sleep(LEAD)
        self.here.wait_stream(self.beside)
        for x in received:
            x.record_stream(self.here)

    def lead(self, works: list[Any]) -> None:
        """Give these transfers, which wait for the compute stream, time to start before it
        continues.
        """
        self.begin()
        if self.here is not None and self.beside is not None and works:
            with self.stream():
                torch.cuda._sleep(LEAD)
            self.here.wait_stream(self.beside)

    def end(self) -> None:
        """Wait for all transfers."""
        for works in (*self.under_way, self.at_end):
            over(works)


def over(works: list[Any]) -> None:
    """Wait for each work, and clear the list so that nothing waits twice."""
    for work in works:
        work.wait()
    works.clear()


@functools.cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
