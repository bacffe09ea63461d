"""The kernels of a spec, and the masks and plans of their calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .agreement import digest, say_once
from .planning import Mask, Plan, Rows, planned
from .sharding import Sharding


@dataclass(frozen=True)
class Kernels:
    """The kernels for parts of one spec, and their arguments.

    module: `module(q, v)` returns the emitted file for these tensors.
    name: the function in it.
    views: (name, buffer, sides) of each slice of a buffer. `sides` has one entry per dimension: "q"
        or "kv" if it is sliced by queries or keys, None if it is whole.
    tensors, numbers: the arguments of the operators, in order.
    places: the arguments that contain the position of the part.
    learned: the views with a gradient, in the order of the gradients.
    packed: True for packed sequences.
    listed: True if the kernels read block lists.
    keys, queries: the ranges of a `Mask`.
    reads: the names that these ranges read.
    sinks: True if sinks join the softmax. One part of each row gets them.
    """

    module: Callable[[Tensor, Tensor], Any]
    name: str
    views: tuple[tuple[str, str, tuple[str | None, ...]], ...]
    tensors: tuple[str, ...]
    numbers: tuple[str, ...]
    places: tuple[str, ...]
    learned: tuple[str, ...]
    packed: bool
    listed: bool
    keys: Callable[..., Any]
    queries: Callable[..., Any] | None
    reads: tuple[str, ...]
    sinks: bool = False

    @property
    def axis(self) -> int:
        """The dimension of positions in q, k and v."""
        return 0 if self.packed else 2


def stands_for(kernels: Kernels, given: Mapping[str, Any], sizes: tuple[int, int, int]) -> int:
    """Return a digest of the mask, and of the numbers and sizes that it reads.

    A plan depends on these, on lengths and on elements of buffers. `sizes`: sequences, heads, and
    heads of keys.
    """
    by_name = dict(zip(("B", "HQ", "HKV"), sizes, strict=True)) | {"b": sizes[0], "h": sizes[1]}
    sized = [
        (n, by_name[n])
        for n in kernels.reads
        if n in by_name and not (kernels.packed and n in "Bb")
    ]
    # Equal numbers have different reprs: 5, 5.0, numpy.int64(5).
    read = [
        (n, float(given[n]))
        for n in kernels.reads
        if n in given and not isinstance(given[n], Tensor)
    ]
    return digest((kernels.name, sized, read))


def check(kernels: Kernels, lengths: tuple[int, int], given: Mapping[str, Any]) -> None:
    """Raise `ValueError` if a buffer does not have one element per position of the whole
    sequence.
    """
    whole = dict(zip(("q", "kv"), lengths, strict=True))
    for _, buffer, sides in kernels.views:
        if buffer not in given:
            continue
        shape = given[buffer].shape
        for axis, side in enumerate(sides):
            if side is not None and shape[axis : axis + 1] != (whole[side],):
                raise ValueError(
                    f"{buffer} must have {whole[side]} elements along dimension {axis}, one per "
                    f"position of the whole sequence, got shape {list(shape)}"
                )


def by_default(
    kernels: Kernels,
    q_sharding: Sharding,
    kv_sharding: Sharding,
    sizes: tuple[int, int, int],
    given: dict[str, Any],
) -> Plan:
    """Return the plan of a call without `plan`. It is cached if it depends on numbers alone."""
    tensors = [n for n in kernels.reads if isinstance(given.get(n), Tensor)]
    if tensors or kernels.packed:
        say_once(
            f"{kernels.name}: each call copies {', '.join(tensors) or 'cu_seqlens'} to the host: "
            "pass `plan=`"
        )
        with reading(kernels):
            mask = mask_of(kernels, given, (q_sharding.length, kv_sharding.length), *sizes)
            return planned(q_sharding, kv_sharding, mask)
    numbers = tuple((n, given[n]) for n in kernels.reads if n in given)
    with reading(kernels):
        return _planned_once(kernels, q_sharding, kv_sharding, sizes, numbers)


@contextmanager
def reading(kernels: Kernels) -> Iterator[None]:
    """Convert errors of a mask's ranges to `ValueError`: the arguments that they read are
    invalid.
    """
    try:
        yield
    except (TypeError, IndexError, AssertionError) as error:
        read = ", ".join(kernels.reads)
        message = (
            f"{kernels.name.removesuffix('_part')}: invalid arguments of the mask (it reads "
            f"{read}): {error}"
        )
        raise ValueError(message) from error


@functools.lru_cache(256)
def _planned_once(
    kernels: Kernels,
    q: Sharding,
    kv: Sharding,
    sizes: tuple[int, int, int],
    numbers: tuple[tuple[str, Any], ...],
) -> Plan:
    return planned(q, kv, mask_of(kernels, dict(numbers), (q.length, kv.length), *sizes))


def mask_of(
    kernels: Kernels,
    given: dict[str, Any],
    lengths: tuple[int, int],
    batches: int,
    heads: int,
    kv_heads: int,
) -> Mask:
    """Return the mask with these buffers and numbers. Tensors are copied to the host."""
    sizes = {"B": batches, "HQ": heads, "HKV": kv_heads, "SQ": lengths[0], "SK": lengths[1]}
    starts = None
    if kernels.packed:
        starts = tuple(given[f"cu_seqlens_{side}"].tolist() for side in "qk")
        sizes["B"] = len(starts[0]) - 1
    values = {n: given.get(n, sizes.get(n)) for n in kernels.reads if n not in ("b", "h")}
    values = {
        n: x.item() if isinstance(x, Tensor) and not x.dim() else x for n, x in values.items()
    }
    values = {n: Rows(x.tolist()) if isinstance(x, Tensor) else x for n, x in values.items()}
    return Mask(
        kernels.keys,
        kernels.queries,
        sizes | values,
        sizes["B"] if "b" in kernels.reads and not kernels.packed else 1,
        heads if "h" in kernels.reads else 1,
        starts,
    )
