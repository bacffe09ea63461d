"""Gluon's language, on torch tensors."""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kgen.verify.gluon.begun import Begun
from kgen.verify.gluon.memory import Barriers, Memory, atomic_add, load, store
from kgen.verify.gluon.running import own, running
from kgen.verify.gluon.schedule import Schedule


def _specialize(partitions: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
    place, seed = own.place, next(running.seeds)

    def run(partition: Callable[..., None], args: tuple[Any, ...]) -> None:
        own.place, own.begun = place, Begun()
        partition(*args)
        assert not own.begun.products, "a partition ends with a product in flight"
        assert not own.begun.stores, "a partition ends with a store in flight"

    running.schedule = Schedule(seed)
    running.schedule.run([functools.partial(run, *partition) for partition in partitions])


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


def _assembly(
    text: str, constraints: str, args: Sequence[Tensor], *, pack: int, **_: Any
) -> Tensor:
    """Run PTX on `pack` elements at a time, neighbors in a row if there are enough.

    Each thread votes alone.
    """
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
        names[words[1]] = (
            new if old is None or old.dtype != new.dtype else torch.where(running, new, old)
        )
    found = torch.stack([names[f"${i}"] for i in range(pack)], 1).flatten()
    return found[: broadcast[0].numel()].reshape(broadcast[0].shape)


def _immediate(word: str, like: Tensor) -> Tensor:
    bits = int(word.removeprefix("0f").removeprefix("0x"), 16)
    return torch.full_like(like, struct.unpack("f", bits.to_bytes(4, "little"))[0])


def no_layout(*_: Any, **__: Any) -> None:
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
    **dict.fromkeys(_LAYOUTS, no_layout),
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
    load=load,
    store=store,
    atomic_add=atomic_add,
    static_range=range,
    program_id=lambda axis: torch.as_tensor(own.place[0]),
    num_programs=lambda axis: own.place[1],
    barrier=lambda: None,
    warp_specialize=_specialize,
    inline_asm_elementwise=_assembly,
)
