"""Peer memory: buffers on the GPUs of one host that other ranks can read.

Copy engines transfer data without multiprocessors, which attention kernels occupy. NCCL's kernels
would need some. The buffers use PyTorch's symmetric memory: one buffer per rank, all of one size,
mapped by the others.
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
"""Number of cached views of a buffer. Making a view takes as long as launching a kernel."""
ALIGNED = 256
"""Alignment of tensors in a buffer, in bytes."""


def aligned(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of a tensor in a buffer, rounded up to `ALIGNED`."""
    size: int = math.prod(shape) * dtype.itemsize
    return -(-size // ALIGNED) * ALIGNED


@dataclass(frozen=True)
class Done:
    """A transfer that ends at an event.

    Without an event it runs on the compute stream, and nothing waits.
    """

    event: torch.cuda.Event | None

    def wait(self) -> None:
        """Let the current stream wait for it."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


@dataclass
class Peers:
    """The buffer of this rank, and the mapped buffers of the others."""

    handle: Any
    buffer: Tensor
    size: int
    milliseconds: int
    """Timeout of barriers. If a rank does not arrive in time, the device raises an error."""
    copying: torch.cuda.Stream
    beside: bool = True
    """True if copies run on a stream of their own, False if they run on the compute stream."""
    used: torch.cuda.Stream | None = None
    over: Done | None = None
    captured: bool = False
    """True if a CUDA graph has its address."""
    views: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def begin(self, brief: bool = False) -> bool:
        """Let the current stream wait for earlier uses of this rank's buffer, before it writes
        there.

        Returns True if transfers run on the current stream: they are `brief`, and no CUDA graph is
        captured. In a graph, a second stream costs the CPU nothing.
        """
        here, capturing = (
            torch.cuda.current_stream(self.device),
            torch.cuda.is_current_stream_capturing(),
        )
        self.beside = capturing or not brief
        if capturing:
            self.captured = True  # no wait: a call ends with all its streams joined
        else:
            here.wait_stream(self.copying)
            if self.used not in (None, here):
                here.wait_stream(self.used)
        self.used = here
        return not self.beside

    @property
    def device(self) -> torch.device:
        """Device of this rank's buffer."""
        return self.buffer.device

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor at an offset, in bytes, of a rank's buffer."""
        key = rank, offset, *shape, dtype
        if key not in self.views:
            if len(self.views) == MOST_VIEWS:
                self.views.clear()
            self.views[key] = self.handle.get_buffer(
                rank, tuple(shape), dtype, offset // dtype.itemsize
            )
        return self.views[key]

    def stream(self) -> AbstractContextManager[object]:
        """Return a context with the stream of copies as the current stream."""
        found: AbstractContextManager[object] = (
            torch.cuda.stream(self.copying) if self.beside else nullcontext()
        )
        return found

    def open(self) -> Done:
        """Let later copies wait until the current streams of all ranks reach this point."""
        if self.beside:
            self.copying.wait_stream(torch.cuda.current_stream(self.device))
        return self._met(0)

    def copy(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Done:
        """Copy the second tensor of each pair, in another rank's buffer, to the first."""
        with self.stream():
            for here, there in copies:
                here.copy_(there)
            return self._done()

    def close(self) -> Done:
        """Return the point at which all ranks are done with earlier copies, and may overwrite their
        buffers.

        Each pass waits for it, because a CUDA graph may follow, which does not wait.
        """
        self.over = self._met(1)
        return self.over

    def _met(self, channel: int) -> Done:
        with self.stream():
            self.handle.barrier(channel, self.milliseconds)
            return self._done()

    def _done(self) -> Done:
        return Done(self.copying.record_event() if self.beside else None)

    def free(self) -> None:
        """Let the current stream wait until no rank reads this rank's buffer."""
        if self.over is not None:
            self.over.wait()


@dataclass
class _Found:
    """The peers of a group, or None, and older buffers that CUDA graphs still use."""

    peers: Peers | None
    kept: list[Peers] = field(default_factory=list)


_FOUND: MutableMapping[dist.ProcessGroup, _Found] = weakref.WeakKeyDictionary()


def peers_of(
    group: dist.ProcessGroup, device: torch.device, size: int, agreed: Callable[[], None]
) -> Peers | None:
    """Return buffers of at least `size` bytes, equal on all ranks, or None if there is no peer
    memory.

    Ranks find this out once, after they have `agreed`. Ranks of one host warn if they have none.
    """
    if device.type != "cuda":
        return None
    found = _FOUND.get(group)
    if found is not None and (found.peers is None or found.peers.size >= size):
        return found.peers
    if torch.cuda.is_current_stream_capturing():
        say_once(
            "a CUDA graph is captured before the first call of its size. NCCL does its transfers"
        )
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
        say_once(
            f"ranks of one host cannot read each other's memory: {hindered}. NCCL does their "
            "transfers"
        )
    if before is None or found is None:
        found = _FOUND[group] = _Found(made)
    else:
        if before.captured:
            found.kept.append(before)
        found.peers = made
    return made


def _hindered(speaking: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return why there is no peer memory; None if there can be, and "" if ranks are on several
    hosts.
    """
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
    return None if all(_told(speaking, seen)) else "their GPUs have no peer access"


def _made(
    group: dist.ProcessGroup, speaking: dist.ProcessGroup, device: torch.device, size: int
) -> tuple[Peers | None, str | None]:
    """Allocate and map buffers.

    Returns them and None, or None and the reason, on all ranks alike.
    """
    buffer = error = None
    try:
        import torch.distributed._symmetric_memory as symmetric

        buffer = symmetric.empty(size, dtype=torch.uint8, device=device)
    except (ImportError, AttributeError, RuntimeError) as raised:
        error = str(raised).partition("\n")[0]
    if not all(_told(speaking, buffer is not None)):
        return None, error or "a rank cannot allocate its buffer"
    try:
        handle = symmetric.rendezvous(buffer, group.group_name)
    except RuntimeError as raised:
        handle, error = None, str(raised).partition("\n")[0]
    if not all(_told(speaking, handle is not None)):
        return None, error or "a rank cannot map the buffers"
    timeout = group._get_backend(device).options._timeout
    milliseconds = int(timeout.total_seconds() * 1000)
    return Peers(handle, buffer, size, milliseconds, torch.cuda.Stream(device)), None


def _told(speaking: dist.ProcessGroup, said: Any) -> list[Any]:
    """Return the object of each rank."""
    heard: list[Any] = [None] * dist.get_world_size(speaking)
    dist.all_gather_object(heard, said, group=speaking)
    return heard
