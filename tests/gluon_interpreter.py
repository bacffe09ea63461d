"""Gluon on the CPU: as much of it as the emitted kernels for Hopper use, on torch tensors.

Partitions run in one order out of many, which `gluon_schedule` draws from a seed, and so does what is in flight.
Barriers count arrivals and bytes as mbarriers do. TMA fills a slot with NaN at once and with data at any time until
its barrier completes; a product reads shared memory at any time between its begin and its wait, and a store by TMA
until it is waited for. So a slot that is freed early, read early or filled twice gives NaN in some orders. It is an
error if nobody completes a barrier, if no partition uses one that is set up, if a product or TMA uses what was stored
in shared memory without a fence since, or a barrier that was set up without one, and if a program reads what the
launch that it begins beside may not have written yet (`gluon_overlap`). A load of numbers is done when they are used,
or at a fence: TMA may overtake it.
Layouts and registers, those of products in flight too, are not modelled; programs run one after the other.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from gluon_overlap import Overlap
from gluon_schedule import InFlight, Schedule
from torch import Tensor
from torch.utils._pytree import tree_map

from kgen.expr.functions import TABLE

SEED = 0
"""Of the order of the first launch's events; each launch after it has the next."""

_own = threading.local()
_schedule = Schedule(SEED)
_overlap = Overlap()
_seeds = itertools.count(SEED)


def explore(seed: int) -> None:
    """Begin with the order of this seed."""
    global _seeds
    _seeds = itertools.count(seed)


class _Own:
    """What one partition has under way, oldest first."""

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.stores: list[InFlight] = []
        self.loads: list[Loading] = []
        self.unfenced: list[Tensor] = []
        self.barriers: list[Barriers] = []


class Loading(Tensor):
    """Numbers on their way from shared memory into registers: there when they are used, or at a fence."""

    landing: InFlight

    @staticmethod
    def of(source: Tensor) -> Loading:
        loading = source.clone().as_subclass(Loading)

        def land() -> None:
            with torch._C.DisableTorchFunctionSubclass():
                loading.copy_(source)

        loading.landing = _schedule.begin(land)
        _own.begun.loads.append(loading)
        return loading

    def land(self) -> Tensor:
        _schedule.finish(self.landing)
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        landed = tree_map(lambda x: x.land() if isinstance(x, Loading) else x, (args, kwargs or {}))
        return function(*landed[0], **landed[1])


def _arrive(barrier: Barrier, count: int, pred: Any = True) -> None:
    for _ in range(count if pred else 0):
        barrier.arrive()


def _fence() -> None:
    """Loads are done, and what was stored is there for TMA and products."""
    for loading in _own.begun.loads:
        loading.land()
    for stored in _own.begun.unfenced:
        stored.fill_(False)
    _own.begun.loads, _own.begun.unfenced = [], []


class Memory:
    """A view of shared memory, and which elements of it were stored without a fence since."""

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
        _schedule.others()
        # Whole numbers are written by other threads, for which a barrier is an order; the rest by TMA.
        return Loading.of(self.tensor) if self.dtype.is_floating_point else self.tensor.clone()

    def store(self, value: Tensor) -> None:
        assert list(value.shape) == self.shape
        assert value.dtype == self.dtype or not value.dtype.is_floating_point
        _schedule.others()
        self.tensor.copy_(value)
        self.unfenced.fill_(True)
        _own.begun.unfenced.append(self.unfenced)

    def fenced(self) -> Tensor:
        """Its numbers, for TMA and products."""
        assert not self.unfenced.any(), "used without a fence since it was stored"
        return self.tensor


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes that were announced are there."""

    def __init__(self) -> None:
        self.phase = self.bytes = self.count = self.left = 0
        self.used = False
        self.unfenced = torch.zeros(1, dtype=torch.bool)

    def init(self, count: int) -> None:
        self.count = self.left = count
        self.unfenced.fill_(True)
        _own.begun.unfenced.append(self.unfenced)

    def arrive(self, announced: int = 0) -> None:
        _schedule.others()
        self._change(1, announced)
        _schedule.others()

    def land(self, count: int) -> None:
        """Bytes that TMA has moved are there."""
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
        _schedule.others(lambda: self.phase & 1 != over)


class Barriers:
    """Barriers in shared memory."""

    def __init__(self, n: int) -> None:
        self.barriers = [Barrier() for _ in range(n)]
        self.shape = [n, 1]
        _own.begun.barriers.append(self)

    @property
    def used(self) -> bool:
        return any(barrier.used for barrier in self.barriers)

    def index(self, i: Any) -> Barrier:
        return self.barriers[int(i)]


class Descriptor:
    """A TMA descriptor: `tensor` by blocks of `block`, zeros outside.

    Addresses are sums of indices times strides, modulo 2**64, and the last index is a multiple of 16 bytes, as on the
    chip, which stops at any other.
    """

    def __init__(
        self, tensor: Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int], layout: Any
    ) -> None:
        self.tensor, self.shape, self.strides, self.block = tensor.detach(), shape, strides, list(block)
        self.dtype, self.layout = tensor.dtype, layout
        self.block_type = SimpleNamespace(shape=self.block, nbytes=math.prod(block) * tensor.element_size())

    def inside(self, at: Sequence[Any]) -> tuple[Tensor, tuple[slice, ...]]:
        """The part of a block that exists, and where in the block it is."""
        starts = [int(i) for i in at]
        assert min(starts) >= 0
        assert max(starts) < 2**31
        assert starts[-1] * self.tensor.element_size() % 16 == 0, "an illegal instruction"
        sizes = [max(0, min(n, size - i)) for i, n, size in zip(starts, self.block, self.shape, strict=True)]
        where = tuple(slice(0, n) for n in sizes)
        if 0 in sizes:
            return self.tensor.new_empty(sizes), where
        elements = 2**64 // self.tensor.element_size()
        first = sum(i * step for i, step in zip(starts, self.strides, strict=True)) % elements
        steps = [step if n > 1 else 0 for n, step in zip(sizes, self.strides, strict=True)]
        return self.tensor.as_strided(sizes, steps, self.tensor.storage_offset() + first), where


def fetch(desc: Descriptor, at: Sequence[Any], barrier: Barrier, slot: Memory) -> None:
    part, where = desc.inside(at)
    _overlap.read(_own.place, part)
    block = torch.zeros(desc.block, dtype=desc.dtype)
    block[where] = part
    assert slot.shape == desc.block
    slot.fenced().fill_(math.nan)

    def land() -> None:
        slot.fenced().copy_(block)
        barrier.land(desc.block_type.nbytes)

    _schedule.begin(land)
    _schedule.others()


def _write(desc: Descriptor, at: Sequence[Any], slot: Memory) -> None:
    part, where = desc.inside(at)
    before = _own.begun.stores[-1] if _own.begun.stores else None
    _own.begun.stores.append(_schedule.begin(lambda: part.copy_(slot.fenced()[where]), before))
    _schedule.others()


def _store_wait(pending: int) -> None:
    _schedule.others()
    stores = _own.begun.stores
    while len(stores) > pending:
        _schedule.finish(stores.pop(0))


class Product:
    """A matrix product in flight. Those of a partition are done in their order."""

    def __init__(self, a: Any, b: Memory, acc: Tensor | Product | None, before: Product | None) -> None:
        self.a, self.b, self.acc = a, b, acc
        self.value: Tensor | None = None
        self.in_flight = _schedule.begin(self._multiply, before and before.in_flight)

    def _multiply(self) -> None:
        a, b = (x.fenced() if isinstance(x, Memory) else x for x in (self.a, self.b))
        assert a.dtype == b.dtype
        product = a.float() @ b.float()
        acc = self.acc.value if isinstance(self.acc, Product) else self.acc
        self.value = product if acc is None else acc + product


def _mma(a: Any, b: Memory, acc: Tensor, *, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async
    products = _own.begun.products
    product = Product(a, b, acc if use_acc else None, products[-1] if products else None)
    products.append(product)
    _schedule.others()
    return product


def _mma_wait(pending: int, deps: Sequence[Any]) -> Any:
    _schedule.others()
    products = _own.begun.products
    while len(products) > pending:
        _schedule.finish(products.pop(0).in_flight)
    waited = [d for d in deps if isinstance(d, Product)]
    assert not any(d in products for d in waited), "the product is still in flight"
    found = [d.value if isinstance(d, Product) else d for d in deps]
    return found[0] if len(found) == 1 else tuple(found)


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
        extent = sum((n - 1) * step for n, step in zip(self.tensor.shape, self.tensor.stride(), strict=True))
        inside = ~live | ((offset >= 0) & (offset <= extent))
        assert inside.all(), "an address outside of the tensor"
        return storage, torch.where(live, at, -1)


def _load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Tensor:
    storage, at = pointer.elements(mask)
    _overlap.read_at(_own.place, storage, at[at >= 0])
    return torch.where(at >= 0, storage[at.clamp_min(0)], torch.as_tensor(other, dtype=storage.dtype))


def _store(pointer: Pointer, value: Tensor, mask: Any = None) -> None:
    storage, at = pointer.elements(mask)
    storage[at[at >= 0]] = value.to(storage.dtype)[at >= 0]


def _atomic_add(pointer: Pointer, value: Any, sem: str) -> Tensor:
    _schedule.others()
    storage, at = pointer.elements(None)
    _overlap.read_at(_own.place, storage, at)
    old = storage[at].clone()
    storage[at] += value
    return old


def _specialize(partitions: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
    global _schedule
    place, seed = _own.place, next(_seeds)

    def run(partition: Callable[..., None], args: tuple[Any, ...]) -> None:
        _own.place, _own.begun = place, _Own()
        partition(*args)
        assert not _own.begun.products, "a partition ends with a product in flight"
        assert not _own.begun.stores, "a partition ends with a store in flight"

    _schedule = Schedule(seed)
    _schedule.run([functools.partial(run, *partition) for partition in partitions])


def _tensors(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: function(*(torch.as_tensor(a) for a in args))


def _where(condition: Any, a: Any, b: Any) -> Tensor:
    return torch.where(torch.as_tensor(condition), a, b)


_PTX: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "fma": lambda a, b, c: a * b + c,
    "min": torch.minimum,
    "rcp": torch.reciprocal,
    "ex2": torch.exp2,
    "tanh": torch.tanh,
    "setp.neu": torch.ne,
    "setp.neu.or": lambda a, b, more: a.ne(b) | more,
    "vote": lambda a, _: a,
}


def _assembly(text: str, constraints: str, args: Sequence[Tensor], *, pack: int, **_: Any) -> Tensor:
    """PTX over `pack` elements at a time, neighbours in a row, others where they are too few; each thread votes for
    itself."""
    broadcast = torch.broadcast_tensors(*map(torch.as_tensor, args))
    missing = -broadcast[0].numel() % pack
    operands = [
        torch.cat((x.flatten(), x.flatten()[:1].expand(missing))).reshape(-1, pack).unbind(1)
        for x in broadcast
    ]
    given = [x for elements in operands for x in elements]
    names: dict[str, Tensor] = {f"${pack + i}": x for i, x in enumerate(given)}
    for i, constraint in enumerate(constraints.split(",")[pack:]):
        if constraint.isdigit():
            names[f"${constraint}"] = given[i]
    running, label = torch.ones_like(given[0], dtype=torch.bool), ""
    for line in re.sub(r"//.*", "", text).replace("{", "").replace("}", "").split(";"):
        words = line.replace(",", " ").split()
        if words and words[0] == f"{label}:":
            running = torch.ones_like(running)
            words = words[1:]
        if not words or words[0] == ".reg":
            continue
        if words[0].startswith("@!"):
            assert words[1] == "bra.uni"
            running, label = names[words[0][2:]], words[2]
            continue
        op = _PTX[re.match(r"setp\.neu(\.or)?|\w+", words[0])[0]]  # type: ignore[index]
        values = [names[x] if x in names else _immediate(x, given[0]) for x in words[2:]]
        new, old = op(*values), names.get(words[1])
        names[words[1]] = new if old is None or old.dtype != new.dtype else torch.where(running, new, old)
    found = torch.stack([names[f"${i}"] for i in range(pack)], 1).flatten()
    return found[: broadcast[0].numel()].reshape(broadcast[0].shape)


def _immediate(word: str, like: Tensor) -> Tensor:
    bits = int(word.removeprefix("0f").removeprefix("0x"), 16)
    return torch.full_like(like, struct.unpack("f", bits.to_bytes(4, "little"))[0])


def _no_layout(*_: Any, **__: Any) -> None:
    return None


def _max(x: Tensor, axis: int) -> Tensor:
    return x.amax(axis)


_LAYOUTS = (
    "BlockedLayout",
    "SliceLayout",
    "NVMMADistributedLayout",
    "NVMMASharedLayout",
    "DotOperandLayout",
    "SwizzledSharedLayout",
    "DistributedLinearLayout",
)

gl = SimpleNamespace(
    **{f"int{n}": getattr(torch, f"int{n}") for n in (32, 64)},
    **{name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")},
    **dict.fromkeys(_LAYOUTS, _no_layout),
    **{
        name: _tensors(getattr(torch, name))
        for name in (
            "abs",
            "ceil",
            "cos",
            "erf",
            "exp",
            "exp2",
            "floor",
            "log",
            "log2",
            "maximum",
            "minimum",
            "rsqrt",
            "sin",
            "sqrt",
        )
    },
    allocate_shared_memory=lambda dtype, shape, layout: (
        Barriers(shape[0]) if dtype == torch.int64 else Memory(torch.full(shape, -7, dtype=dtype))
    ),
    arange=lambda start, end, layout=None: torch.arange(start, end),
    full=lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
    convert_layout=lambda x, layout, assert_trivial=False: x,
    broadcast=torch.broadcast_tensors,
    split=lambda x: x.unbind(-1),
    fma=lambda a, b, c: a * b + c,
    where=_where,
    sum=torch.sum,
    max=_max,
    cdiv=lambda a, b: (a + b - 1) // b,
    to_tensor=torch.as_tensor,
    cast=lambda x, dtype: torch.as_tensor(x).to(dtype),
    load=_load,
    store=_store,
    atomic_add=_atomic_add,
    static_range=range,
    program_id=lambda axis: torch.as_tensor(_own.place[0]),
    num_programs=lambda axis: _own.place[1],
    barrier=lambda: None,
    warp_specialize=_specialize,
    inline_asm_elementwise=_assembly,
)


class Kernel:
    """A jitted function: called like any other by kernels, launched over a grid from outside."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.used: dict[str, list[bool]] = {}

    def unused(self) -> list[str]:
        """Barriers that no launch so far has used. Triton may give the place of such barriers to other data."""
        return [
            f"barriers that nobody uses, number {i} of {constants}"
            for constants, used in self.used.items()
            for i, one in enumerate(used)
            if not one
        ]

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.function(*args, **options)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(
            *args: Any, num_warps: int, enable_fp_fusion: bool, launch_pdl: bool = False, **options: Any
        ) -> None:
            named = dict(zip(self.function.__code__.co_varnames, args, strict=False))
            counter = named.get("counter_ptr")
            # Forward begins beside what fills its counter, of which backward has two, and older.
            _overlap.begin(launch_pdl, [counter] if counter is not None and len(counter) == 1 else [])
            given = [Pointer(a) if isinstance(a, Tensor) else a for a in args]
            constants = ", ".join(f"{name}={value}" for name, value in options.items())
            for number in range(grid[0]):
                _own.place, _own.begun = (number, grid[0]), _Own()
                try:
                    self.function(*given, **options)
                    now = [barriers.used for barriers in _own.begun.barriers]
                    before = self.used.get(constants, [False] * len(now))
                    self.used[constants] = [a or b for a, b in zip(before, now, strict=True)]
                    _overlap.let_begin(_own.place)
                finally:
                    del _own.place
            _overlap.end()

        return launch


def _following(launch: Callable[..., None], *args: Any, **meta: Any) -> None:
    """The emitted `_launch`, watched."""
    tensors = [x.tensor if isinstance(x, Descriptor) else x for x in args]
    _overlap.following(lambda: launch(*args, **meta), [x for x in tensors if isinstance(x, Tensor)])


def _jit(function: Any = None, **options: Any) -> Any:
    return Kernel(function) if function is not None else Kernel


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Have `import triton.experimental.gluon` give this module's Gluon meanwhile."""
    mbarrier = SimpleNamespace(
        MBarrierLayout=_no_layout,
        init=lambda barrier, count: barrier.init(count),
        expect=lambda barrier, count, pred=True: barrier.arrive(count) if pred else None,
        wait=lambda barrier, parity: barrier.wait(parity),
        arrive=_arrive,
    )
    tma = SimpleNamespace(
        async_load=fetch,
        async_store=_write,
        store_wait=_store_wait,
    )
    names: dict[str, dict[str, Any]] = {
        "": {"jit": _jit, "language": gl},
        ".language": vars(gl),
        ".language.nvidia": {},
        ".language.nvidia.hopper": {
            "mbarrier": mbarrier,
            "tma": tma,
            "fence_async_shared": _fence,
            "warpgroup_mma": _mma,
            "warpgroup_mma_wait": _mma_wait,
        },
        ".nvidia": {},
        ".nvidia.hopper": {"TensorDescriptor": Descriptor},
    }
    modules = {}
    for name, contents in names.items():
        module = ModuleType(f"triton.experimental.gluon{name}")
        vars(module).update(contents)
        modules[module.__name__] = module
    ours = modules["triton.experimental.gluon"]
    with mock.patch.dict(sys.modules, modules), mock.patch("triton.experimental.gluon", ours, create=True):
        yield


class _Whole(int):
    """A whole number that kernels know when they are compiled; launchers take its value."""

    @property
    def value(self) -> int:
        return int(self)


BOTH = {"_tile_and_head"} | {
    spelling.form.partition("(")[0]
    for row in TABLE.values()
    for spelling in {*row.spellings("triton")} & {*row.spellings("gluon")}
    if spelling.helper
}
"""Helpers of Triton's kernels that those of Gluon call, too."""


def prepare(module: Any, multiprocessors: int = 3) -> None:
    """Have an emitted module's launcher take its kernels for Hopper, here, wherever TMA could load the operands."""
    import triton.language as tl

    module._on_hopper = lambda *tensors: all(module._by_tma(x) for x in tensors)
    module._multiprocessors = lambda device: multiprocessors
    module.gdc_wait = lambda: _overlap.wait(_own.place)
    # Triton's kernels say it as well: what is ahead of them is over.
    module.gdc_launch_dependents = lambda: hasattr(_own, "place") and _overlap.let_begin(_own.place)
    module._launch = functools.partial(_following, module._launch)
    for name, value in list(vars(module).items()):
        if isinstance(value, tl.constexpr):
            setattr(module, name, _Whole(value.value) if isinstance(value.value, int) else value.value)
        elif hasattr(value, "fn") and name in BOTH:
            setattr(module, name, _of_both(value, vars(module)))


def _of_both(function: Any, names: dict[str, Any]) -> Callable[..., Any]:
    """One of them: ours in a kernel that runs here."""
    ours = FunctionType(function.fn.__code__, {**names, "tl": gl})
    return lambda *args: ours(*args) if hasattr(_own, "place") else function(*args)
