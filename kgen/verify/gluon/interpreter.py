"""Gluon on the CPU, on torch tensors: the subset that emitted kernels use.

`schedule` draws the order of partitions and asynchronous events from a seed. Barriers count
arrivals and bytes as mbarriers do. TMA fills a slot with NaN at once, and with data at any time
until its barrier completes. A product reads shared memory at any time between its start and its
wait. A store by TMA reads until it is awaited. So a slot that is released early, read early or
filled twice gives NaN in some orders. A load to registers completes when its values are used, or at
a fence, so TMA may overwrite its source.

These are errors:

- a barrier that never completes, or that no partition uses
- a product or TMA on stored data, or on an initialized barrier, without a fence in between
- a read of data that the overlapping previous launch may not have written yet (`overlap`)

Layouts and registers are not modelled, and programs run one after the other.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from torch import Tensor

from kgen.expr.functions import TABLE
from kgen.family import Chip
from kgen.verify.call import take_portable_kernels
from kgen.verify.gluon import memory
from kgen.verify.gluon.begun import Begun
from kgen.verify.gluon.language import gl, no_layout
from kgen.verify.gluon.memory import Descriptor, Pointer
from kgen.verify.gluon.products import mma, mma_wait
from kgen.verify.gluon.running import own, running
from kgen.verify.toolchain import import_file


class Kernel:
    """A jitted function. Kernels call it directly; launchers launch it over a grid."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.used: dict[str, list[bool]] = {}

    def unused(self) -> list[str]:
        """Barriers that no launch has used so far. Triton may reuse the memory of such barriers."""
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
            *args: Any,
            num_warps: int,
            enable_fp_fusion: bool,
            launch_pdl: bool = False,
            **options: Any,
        ) -> None:
            named = dict(zip(self.function.__code__.co_varnames, args, strict=False))
            counter = named.get("counter_ptr")
            # Forward overlaps the fill of its counter. Backward has two counters, filled earlier.
            running.overlap.begin(
                launch_pdl, [counter] if counter is not None and len(counter) == 1 else []
            )
            given = [Pointer(a) if isinstance(a, Tensor) else a for a in args]
            constants = ", ".join(f"{name}={value}" for name, value in options.items())
            for number in range(grid[0]):
                own.place, own.begun = (number, grid[0]), Begun()
                try:
                    self.function(*given, **options)
                    now = [barriers.used for barriers in own.begun.barriers]
                    before = self.used.get(constants, [False] * len(now))
                    self.used[constants] = [a or b for a, b in zip(before, now, strict=True)]
                    running.overlap.let_begin(own.place)
                finally:
                    del own.place
            running.overlap.end()

        return launch


def _following(launch: Callable[..., None], *args: Any, **meta: Any) -> None:
    """Call the emitted `_launch`, and record its writes."""
    tensors = [x.tensor if isinstance(x, Descriptor) else x for x in args]
    running.overlap.following(
        lambda: launch(*args, **meta), [x for x in tensors if isinstance(x, Tensor)]
    )


def _jit(function: Any = None, **options: Any) -> Any:
    return Kernel(function) if function is not None else Kernel


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Make `import triton.experimental.gluon` return this module's Gluon within the context."""
    mbarrier = SimpleNamespace(
        MBarrierLayout=no_layout,
        init=lambda barrier, count: barrier.init(count),
        expect=lambda barrier, count, pred=True: barrier.arrive(count) if pred else None,
        wait=lambda barrier, parity: barrier.wait(parity),
        arrive=memory.arrive,
    )
    tma = SimpleNamespace(
        async_load=memory.fetch,
        async_store=memory.write,
        store_wait=memory.store_wait,
    )
    names: dict[str, dict[str, Any]] = {
        "triton.experimental.gluon": {"jit": _jit, "language": gl},
        "triton.experimental.gluon.language": vars(gl),
        "triton.experimental.gluon.language.nvidia": {},
        "triton.experimental.gluon.language.nvidia.hopper": {
            "mbarrier": mbarrier,
            "tma": tma,
            "fence_async_shared": memory.fence,
            "warpgroup_mma": mma,
            "warpgroup_mma_wait": mma_wait,
        },
        "triton.experimental.gluon.nvidia": {},
        "triton.experimental.gluon.nvidia.hopper": {"TensorDescriptor": Descriptor},
    }
    modules = {}
    for name, contents in names.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(contents)
    ours = modules["triton.experimental.gluon"]
    with _found(modules), mock.patch("triton.experimental.gluon", ours, create=True):
        yield


@contextlib.contextmanager
def _found(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Make imports find these modules within the context.

    Other modules that are imported within it stay. An emitted file may import files next to it when
    a call needs them.
    """
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


class _Whole(int):
    """An integer that is a compile-time constant of kernels. Launchers read its value."""

    @property
    def value(self) -> int:
        return int(self)


BOTH = {"_tile_and_head"} | {
    spelling.form.partition("(")[0]
    for row in TABLE.values()
    for spelling in {*row.spellings("triton")} & {*row.spellings("gluon")}
    if spelling.helper
}
"""Helpers that kernels in Triton and in Gluon call."""


def prepare(module: Any, chip: Chip, multiprocessors: int = 3) -> None:
    """Make an emitted module's launcher use its Gluon kernels for a chip here, if TMA could load
    the operands.
    """
    import triton.language as tl

    take_portable_kernels(module)
    setattr(module, chip.choice, lambda *tensors: all(module._by_tma(x) for x in tensors))
    module._multiprocessors = lambda device: multiprocessors
    module.gdc_wait = lambda: running.overlap.wait(own.place)
    # Kernels in Triton call it, too. The launch before them has ended.
    module.gdc_launch_dependents = _let_begin
    module._launch = functools.partial(_following, module._launch)
    for name, value in list(vars(module).items()):
        if isinstance(value, tl.constexpr):
            setattr(
                module, name, _Whole(value.value) if isinstance(value.value, int) else value.value
            )
        elif hasattr(value, "fn") and name in BOTH:
            setattr(module, name, _of_both(value, vars(module)))


def imported(path: Path, name: str, chip: Chip) -> Any:
    """Import an emitted file as `import_file`, with Gluon kernels for a chip that run in this
    interpreter.
    """
    with installed():
        module: Any = import_file(path, name)
        beside = [getattr(module, chip.module)()] if hasattr(module, chip.module) else []
    for one in (module, *beside):
        prepare(one, chip)
    return module


def _let_begin() -> None:
    if hasattr(own, "place"):
        running.overlap.let_begin(own.place)


def _of_both(function: Any, names: dict[str, Any]) -> Callable[..., Any]:
    """Return a helper that uses this interpreter inside kernels that run here."""
    ours = FunctionType(function.fn.__code__, {**names, "tl": gl})
    return lambda *args: ours(*args) if hasattr(own, "place") else function(*args)
