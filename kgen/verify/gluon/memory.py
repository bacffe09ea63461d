"""Shared memory, its barriers, TMA, and the addresses of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from kgen.verify.gluon.running import own, running
from kgen.verify.gluon.schedule import InFlight


class Loading(Tensor):  # type: ignore[misc]
    """Values of a load from shared memory to registers.

    The load completes when they are used, or at a fence.
    """

    landing: InFlight

    @staticmethod
    def of(source: Tensor) -> Loading:
        loading: Loading = source.clone().as_subclass(Loading)

        def land() -> None:
            with torch._C.DisableTorchFunctionSubclass():
                loading.copy_(source)

        loading.landing = running.schedule.begin(land)
        own.begun.loads.append(loading)
        return loading

    def land(self) -> Tensor:
        running.schedule.finish(self.landing)
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        landed = tree_map(lambda x: x.land() if isinstance(x, Loading) else x, (args, kwargs or {}))
        return function(*landed[0], **landed[1])


def arrive(barrier: Barrier, count: int, pred: Any = True) -> None:
    for _ in range(count if pred else 0):
        barrier.arrive()


def fence() -> None:
    """Complete loads, and make stores visible to TMA and products."""
    for loading in own.begun.loads:
        loading.land()
    for stored in own.begun.unfenced:
        stored.fill_(False)
    own.begun.loads, own.begun.unfenced = [], []


class Memory:
    """A view of shared memory, and the elements that were stored since the last fence."""

    def __init__(self, tensor: Tensor, unfenced: Tensor | None = None) -> None:
        self.tensor = tensor
        self.unfenced = torch.zeros_like(tensor, dtype=torch.bool) if unfenced is None else unfenced
        self.shape = list(tensor.shape)
        self.dtype = tensor.dtype

    def _view(self, of: Callable[[Tensor], Tensor]) -> Memory:
        return Memory(of(self.tensor), of(self.unfenced))

    def index(self, i: Any) -> Memory:
        return self._view(lambda x: x[int(i)])

    def reshape(self, shape: Sequence[int]) -> Memory:
        return self._view(lambda x: x.view(*shape))

    def permute(self, order: Sequence[int]) -> Memory:
        return self._view(lambda x: x.permute(*order))

    def slice(self, start: int, length: int, dim: int = 0) -> Memory:
        return self._view(lambda x: x.narrow(dim, start, length))

    def load(self, layout: Any) -> Tensor:
        running.schedule.others()
        # Integers are written by threads, which barriers order. Other data are written by TMA.
        return Loading.of(self.tensor) if self.dtype.is_floating_point else self.tensor.clone()

    def store(self, value: Tensor) -> None:
        assert list(value.shape) == self.shape
        assert value.dtype == self.dtype or not value.dtype.is_floating_point
        running.schedule.others()
        self.tensor.copy_(value)
        self.unfenced.fill_(True)
        own.begun.unfenced.append(self.unfenced)

    def fenced(self) -> Tensor:
        """Return its values for TMA and products, after a fence."""
        assert not self.unfenced.any(), "used without a fence since it was stored"
        return self.tensor


class Barrier:
    """An mbarrier. A phase ends when all threads and all announced bytes have arrived."""

    def __init__(self) -> None:
        self.phase = self.bytes = self.count = self.left = 0
        self.used = False
        self.unfenced = torch.zeros(1, dtype=torch.bool)

    def init(self, count: int) -> None:
        self.count = self.left = count
        self.unfenced.fill_(True)
        own.begun.unfenced.append(self.unfenced)

    def arrive(self, announced: int = 0) -> None:
        running.schedule.others()
        self._change(1, announced)
        running.schedule.others()

    def land(self, count: int) -> None:
        """Count bytes that TMA has moved."""
        assert not self.unfenced, "TMA arrives at a barrier without a fence since it was set up"
        self._change(0, -count)

    def _change(self, arrivals: int, more: int) -> None:
        self.used = True
        self.left -= arrivals
        self.bytes += more
        assert self.left >= 0, "more arrivals than a phase of the barrier has"
        if self.left == 0 and self.bytes == 0:
            self.phase, self.left = self.phase + 1, self.count

    def wait(self, parity: Any) -> None:
        self.used = True
        over = int(parity)
        running.schedule.others(lambda: self.phase & 1 != over)


class Barriers:
    """Barriers in shared memory."""

    def __init__(self, n: int) -> None:
        self.barriers = [Barrier() for _ in range(n)]
        self.shape = [n, 1]
        own.begun.barriers.append(self)

    @property
    def used(self) -> bool:
        return any(barrier.used for barrier in self.barriers)

    def index(self, i: Any) -> Barrier:
        return self.barriers[int(i)]


class Descriptor:
    """A TMA descriptor: `tensor` in blocks of `block`, zeros outside.

    Addresses are sums of indices times strides, modulo 2**64. The last index must be a multiple of
    16 bytes; a GPU stops at any other.
    """

    def __init__(
        self,
        tensor: Tensor,
        shape: Sequence[int],
        strides: Sequence[int],
        block: Sequence[int],
        layout: Any,
    ) -> None:
        self.tensor, self.shape, self.strides, self.block = (
            tensor.detach(),
            shape,
            strides,
            list(block),
        )
        self.dtype, self.layout = tensor.dtype, layout
        self.block_type = SimpleNamespace(
            shape=self.block, nbytes=math.prod(block) * tensor.element_size()
        )

    def inside(self, at: Sequence[Any]) -> tuple[Tensor, tuple[slice, ...]]:
        """Return the part of a block inside the tensor, and its place in the block."""
        starts = [int(i) for i in at]
        assert min(starts) >= 0
        assert max(starts) < 2**31
        assert starts[-1] * self.tensor.element_size() % 16 == 0, "an illegal instruction"
        sizes = [
            max(0, min(n, size - i))
            for i, n, size in zip(starts, self.block, self.shape, strict=True)
        ]
        where = tuple(slice(0, n) for n in sizes)
        if 0 in sizes:
            return self.tensor.new_empty(sizes), where
        elements = 2**64 // self.tensor.element_size()
        first = sum(i * step for i, step in zip(starts, self.strides, strict=True)) % elements
        steps = [step if n > 1 else 0 for n, step in zip(sizes, self.strides, strict=True)]
        return self.tensor.as_strided(sizes, steps, self.tensor.storage_offset() + first), where


def fetch(desc: Descriptor, at: Sequence[Any], barrier: Barrier, slot: Memory) -> None:
    part, where = desc.inside(at)
    running.overlap.read(own.place, part)
    block = torch.zeros(desc.block, dtype=desc.dtype)
    block[where] = part
    assert slot.shape == desc.block
    slot.fenced().fill_(math.nan)

    def land() -> None:
        slot.fenced().copy_(block)
        barrier.land(desc.block_type.nbytes)

    running.schedule.begin(land)
    running.schedule.others()


def write(desc: Descriptor, at: Sequence[Any], slot: Memory) -> None:
    part, where = desc.inside(at)
    before = own.begun.stores[-1] if own.begun.stores else None
    own.begun.stores.append(
        running.schedule.begin(lambda: part.copy_(slot.fenced()[where]), before)
    )
    running.schedule.others()


def store_wait(pending: int) -> None:
    running.schedule.others()
    stores = own.begun.stores
    while len(stores) > pending:
        running.schedule.finish(stores.pop(0))


class Pointer:
    """The address of an element of a tensor."""

    def __init__(self, tensor: Tensor, offset: Any = 0) -> None:
        self.tensor, self.offset = tensor, offset
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, steps: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + steps)

    def elements(self, mask: Any) -> tuple[Tensor, Tensor]:
        offset = torch.as_tensor(self.offset)
        live = torch.as_tensor(True if mask is None else mask).expand(offset.shape)
        storage = self.tensor.detach().as_strided(
            (self.tensor.untyped_storage().nbytes() // self.tensor.element_size(),), (1,), 0
        )
        at = offset + self.tensor.storage_offset()
        extent = sum(
            (n - 1) * step for n, step in zip(self.tensor.shape, self.tensor.stride(), strict=True)
        )
        inside = ~live | ((offset >= 0) & (offset <= extent) & bool(self.tensor.numel()))
        assert inside.all(), "an address outside of the tensor"
        return storage, torch.where(live, at, -1)


def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Tensor:
    storage, at = pointer.elements(mask)
    live = at >= 0
    running.overlap.read_at(own.place, storage, at[live])
    found = torch.as_tensor(other, dtype=storage.dtype).expand(at.shape).clone()
    found[live] = storage[at[live]]
    return found


def store(pointer: Pointer, value: Tensor, mask: Any = None) -> None:
    storage, at = pointer.elements(mask)
    storage[at[at >= 0]] = value.to(storage.dtype)[at >= 0]


def atomic_add(pointer: Pointer, value: Any, sem: str) -> Tensor:
    running.schedule.others()
    storage, at = pointer.elements(None)
    running.overlap.read_at(own.place, storage, at)
    old = storage[at].clone()
    storage[at] += value
    return old
