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
    """Keys and values of this rank, with their sequence along `axis`, and where others are."""

    plan: Plan
    group: dist.ProcessGroup
    axis: int
    k: Tensor
    v: Tensor

    @functools.cached_property
    def rank(self) -> int:
        """Of this process."""
        rank: int = dist.get_rank(self.group)
        return rank

    @functools.cached_property
    def kind(self) -> tuple[Any, ...]:
        """What it depends on besides a plan where they lie in buffers."""
        return self.axis, *((rows_first(x, self.axis, 1), x.dtype) for x in (self.k, self.v))

    @property
    def others(self) -> list[int]:
        """All ranks but this."""
        return [other for other in range(self.plan.ranks) if other != self.rank]

    def own(self, interval: Interval) -> tuple[Tensor, Tensor]:
        """A run of positions that this rank has."""
        rows = self.plan.kv.rows(self.rank, *interval)
        return run_of(self.k, self.axis, rows), run_of(self.v, self.axis, rows)

    def empty(self, interval: Interval) -> tuple[Tensor, Tensor]:
        """Room for a run that another rank has."""
        length = interval[1] - interval[0]
        return like(self.k, self.axis, length), like(self.v, self.axis, length)


Made = TypeVar("Made")


def kept_with_plan(make: Callable[..., Made]) -> Callable[..., Made]:
    """A function of keys and numbers whose results are kept as long as their plan."""

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
    """Tensors on their way to ranks, and from ranks."""
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
    """The rows of all ranks along an axis, of which each has so many, and the work after which they are there."""
    longest = max(lengths)
    if x.shape[axis] == longest:
        own = x.contiguous()
    else:  # what is gathered has one size
        own = like(x, axis, longest)
        run_of(own, axis, (0, x.shape[axis])).copy_(x)
    there = [like(x, axis, longest) for _ in lengths]
    work = dist.all_gather(there, own, group=group, async_op=async_op)
    return [run_of(one, axis, (0, length)) for one, length in zip(there, lengths, strict=True)], work


# --- room for them ------------------------


def like(x: Tensor, axis: int, length: int, dtype: torch.dtype | None = None) -> Tensor:
    shape = [*x.shape]
    shape[axis] = length
    return x.new_empty(shape, dtype=dtype)


def empty_rows_first(x: Tensor, axis: int, length: int, dtype: torch.dtype | None = None) -> Tensor:
    """So many rows of a tensor like this one, each row in one piece: runs of them travel as they are."""
    return x.new_empty(rows_first(x, axis, length), dtype=dtype)


def rows_first(x: Tensor, axis: int, length: int) -> tuple[int, ...]:
    """The shape of so many rows, with their axis first."""
    return length, *x.shape[:axis], *x.shape[axis + 1 :]


# --- beside what computes ------------------------

LEAD = 20_000
"""Cycles: some ten microseconds, in which a kernel of NCCL is there."""


class Beside:
    """Transfers on a stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.apart = device, device.type == "cuda"
        self.under_way: list[list[Any]] = []
        self.at_end: list[Any] = []
        self.here: torch.cuda.Stream | None = None
        self.beside: torch.cuda.Stream | None = None

    def in_line(self) -> None:
        """Transfers are so brief that they are made in the stream that computes."""
        self.apart = False

    def begin(self) -> None:
        """What follows is behind what the stream that computes had to do until here."""
        if self.apart:
            self.here, self.beside = torch.cuda.current_stream(self.device.index), _stream_beside(self.device)
            self.beside.wait_stream(self.here)

    def stream(self) -> AbstractContextManager[object]:
        """Where tensors of transfers are made, and transfers begin."""
        return nullcontext() if self.beside is None else torch.cuda.stream(self.beside)

    def wait(self, works: list[Any] | None = None, received: Sequence[Tensor] = ()) -> None:
        """What computes goes on after these, with what they bring; and a moment after what is under way besides can
        begin: a kernel that has all of a GPU leaves nothing to a transfer that became ready with it, until it is over.
        """
        if self.here is None or self.beside is None:
            over(works or [])
            return
        if not any(self.under_way):
            return
        with self.stream():  # whose memory they have: it is not given away before they are over
            over(works or [])
            if any(self.under_way):
                torch.cuda._sleep(LEAD)
        self.here.wait_stream(self.beside)
        for x in received:
            x.record_stream(self.here)

    def lead(self, works: list[Any]) -> None:
        """What computes goes on a moment after these can begin, which are behind all that it had to do until here."""
        self.begin()
        if self.here is not None and self.beside is not None and works:
            with self.stream():
                torch.cuda._sleep(LEAD)
            self.here.wait_stream(self.beside)

    def end(self) -> None:
        """Nothing is under way any more."""
        for works in (*self.under_way, self.at_end):
            over(works)


def over(works: list[Any]) -> None:
    """What is over is not waited for again."""
    for work in works:
        work.wait()
    works.clear()


@functools.cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
