"""Memory of GPUs of one host that their ranks read of each other. Copy engines do that, beside kernels that have all
multiprocessors, where NCCL's kernels would take some of them.

It stands on PyTorch's symmetric memory: one buffer for each rank, of one size, which the others see.
"""

from __future__ import annotations

import math
import socket
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import say_once, talk

MOST_VIEWS = 256
"""Of a buffer, that are kept: to make one takes as long as to launch a kernel."""
ALIGNED = 256
"""Bytes, of what lies in a buffer."""


def aligned(shape: Sequence[int], dtype: torch.dtype) -> int:
    """The bytes that a tensor has in a buffer."""
    size: int = math.prod(shape) * dtype.itemsize
    return -(-size // ALIGNED) * ALIGNED


@dataclass(frozen=True)
class Done:
    """A point of a stream, as a transfer that can be waited for; without an event, of the stream that computes."""

    event: torch.cuda.Event | None

    def wait(self) -> None:
        """What the current stream does next is behind it."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


@dataclass
class Peers:
    """A buffer of this rank, and those of the others."""

    handle: Any
    buffer: Tensor
    size: int
    milliseconds: int
    """After which a rank that does not come is an error of the device."""
    copying: torch.cuda.Stream
    beside: bool = True
    """Copies are made on a stream of their own, else on the one that computes."""
    used: torch.cuda.Stream | None = None
    over: Done | None = None
    captured: bool = False
    """A CUDA graph has its address."""
    views: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def begin(self, brief: bool = False) -> bool:
        """The current stream is going to write into this rank's buffer: behind what an earlier call did there. Gives
        whether what follows is done in it, as `brief` transfers are but in a graph, where launching costs nothing."""
        here, capturing = torch.cuda.current_stream(self.device), torch.cuda.is_current_stream_capturing()
        self.beside = capturing or not brief
        if capturing:
            self.captured = True  # all streams are joined at the end of a call
        else:
            here.wait_stream(self.copying)
            if self.used not in (None, here):
                here.wait_stream(self.used)
        self.used = here
        return not self.beside

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return self.buffer.device

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor so many bytes into a rank's buffer."""
        key = rank, offset, *shape, dtype
        if key not in self.views:
            if len(self.views) == MOST_VIEWS:
                self.views.clear()
            self.views[key] = self.handle.get_buffer(rank, tuple(shape), dtype, offset // dtype.itemsize)
        return self.views[key]

    def stream(self) -> AbstractContextManager[object]:
        """Copies between buffers, and the tensors for them."""
        found: AbstractContextManager[object] = (
            torch.cuda.stream(self.copying) if self.beside else nullcontext()
        )
        return found

    def open(self) -> Done:
        """Copies that follow wait until all ranks have come to this point of their current streams."""
        if self.beside:
            self.copying.wait_stream(torch.cuda.current_stream(self.device))
        return self._met(0)

    def copy(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Done:
        """To each first tensor the second, which is in another's buffer: when that is done here."""
        with self.stream():
            for here, there in copies:
                here.copy_(there)
            return self._done()

    def close(self) -> Done:
        """When all ranks are done with the copies ahead of this. They may write into their buffers again then: no pass
        ends before, as what follows may be a CUDA graph, which waits for nothing."""
        self.over = self._met(1)
        return self.over

    def _met(self, channel: int) -> Done:
        with self.stream():
            self.handle.barrier(channel, self.milliseconds)
            return self._done()

    def _done(self) -> Done:
        return Done(self.copying.record_event() if self.beside else None)

    def free(self) -> None:
        """The current stream goes on when no rank reads this one's buffer any more."""
        if self.over is not None:
            self.over.wait()


@dataclass
class _Found:
    """Of a group: its peers, where there are any, and buffers that graphs have."""

    peers: Peers | None
    kept: list[Peers] = field(default_factory=list)


_FOUND: MutableMapping[dist.ProcessGroup, _Found] = weakref.WeakKeyDictionary()


def peers_of(
    group: dist.ProcessGroup, device: torch.device, size: int, agreed: Callable[[], None]
) -> Peers | None:
    """Buffers of so many bytes, the same on all ranks, each call with no less; None where ranks do not see each other's
    memory. Ranks find that out once, after they have `agreed`; what hinders those of one host is said."""
    if device.type != "cuda":
        return None
    found = _FOUND.get(group)
    if found is not None and (found.peers is None or found.peers.size >= size):
        return found.peers
    if torch.cuda.is_current_stream_capturing():
        say_once("a CUDA graph is captured ahead of a first call of its size: its transfers are NCCL's")
        return None
    agreed()
    speaking = talk(group, device)
    before = found.peers if found is not None else None
    if before is not None:
        torch.cuda.synchronize(device)
        dist.barrier(speaking)
        size = max(size, before.size + before.size // 4)
    hindered = None if before is not None else _hindered(speaking, device)
    made = None
    if hindered is None:
        made, hindered = _made(group, speaking, device, size)
    if hindered:
        say_once(f"ranks of one host do not read each other's memory: {hindered}. Their transfers are NCCL's")
    if before is None or found is None:
        found = _FOUND[group] = _Found(made)
    else:
        found.kept += [before] * before.captured
        found.peers = made
    return made


def _hindered(speaking: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why ranks do not see each other's memory: nothing where they are of several hosts."""
    host = socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text()
    places = _told(speaking, (host, device.index))
    if len({one for one, _ in places}) > 1:
        return ""
    others = {index for _, index in places}
    seen = len(others) == len(places) and all(
        other == device.index
        or (other < torch.cuda.device_count() and torch.cuda.can_device_access_peer(device, other))
        for other in others
    )
    return None if all(_told(speaking, seen)) else "their GPUs do not see each other"


def _made(
    group: dist.ProcessGroup, speaking: dist.ProcessGroup, device: torch.device, size: int
) -> tuple[Peers | None, str | None]:
    """Peers of buffers of a size; else what hinders, on all ranks."""
    buffer = error = None
    try:
        import torch.distributed._symmetric_memory as symmetric

        buffer = symmetric.empty(size, dtype=torch.uint8, device=device)
    except (ImportError, AttributeError, RuntimeError) as raised:
        error = str(raised).partition("\n")[0]
    if not all(_told(speaking, buffer is not None)):
        return None, error or "a rank has no room"
    try:
        handle = symmetric.rendezvous(buffer, group.group_name)
    except RuntimeError as raised:
        handle, error = None, str(raised).partition("\n")[0]
    if not all(_told(speaking, handle is not None)):
        return None, error or "a rank cannot"
    timeout = group._get_backend(device).options._timeout
    milliseconds = int(timeout.total_seconds() * 1000)
    return Peers(handle, buffer, size, milliseconds, torch.cuda.Stream(device)), None


def _told(speaking: dist.ProcessGroup, said: Any) -> list[Any]:
    """The message of each rank."""
    heard: list[Any] = [None] * dist.get_world_size(speaking)
    dist.all_gather_object(heard, said, group=speaking)
    return heard
