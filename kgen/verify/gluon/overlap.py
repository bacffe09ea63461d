"""Programmatic dependent launches on the CPU, where kernels run one after the other.

A dependent kernel starts as soon as all programs of the previous launch allow it
(`gdc_launch_dependents`) or end. Before `gdc_wait`, a program may not read data of the previous
launch. A program of that launch may allow the start before its own wait. Then data of the launch
before it are forbidden, too.

A wait guarantees that the previous launch has ended. Each kernel must therefore wait before it
ends. Otherwise, the next kernel's wait would not cover the previous launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Elements = dict[int, Tensor]
"""Sets of elements: a boolean tensor for each storage."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
EARLY = "read before the launch ahead is known to be done"
LATE = "over before the launch ahead is known to be"


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage().data_ptr())


def _bits(x: Tensor) -> Tensor:
    """Return all elements of the storage as integers."""
    count = x.untyped_storage().nbytes() // x.element_size()
    return x.detach().as_strided((count,), (1,), 0).view(BITS[x.element_size()])


def _both(some: Elements, others: Elements) -> Elements:
    found = {**some, **others}
    return found | {key: some[key] | others[key] for key in some.keys() & others.keys()}


class Overlap:
    """The launches that may still be running, and their writes."""

    def __init__(self) -> None:
        self._written: Elements = {}
        self._pending: Elements = {}
        self._waited: set[Any] = set()
        self._early = False

    def following(self, launch: Callable[[], None], tensors: Iterable[Tensor]) -> None:
        """Run a launch of a kernel on `tensors`, and record its writes."""
        there = {_storage(x): x for x in tensors if x.numel()}
        before = {key: _bits(x).clone() for key, x in there.items()}
        self._pending, self._early = {}, False
        launch()
        written = {key: _bits(x) != before[key] for key, x in there.items()}
        self._written = _both(written, self._pending if self._early else {})

    def begin(self, beside: bool, filled: Iterable[Tensor] = ()) -> None:
        """Start a kernel.

        It overlaps the previous launch if `beside`, or the fill of the tensors `filled`.
        """
        fills = {_storage(x): torch.ones_like(_bits(x), dtype=torch.bool) for x in filled}
        self._pending = (fills or self._written) if beside else {}
        self._waited.clear()

    def wait(self, program: Any) -> None:
        """Handle `gdc_wait`."""
        self._waited.add(program)

    def let_begin(self, program: Any) -> None:
        """Handle `gdc_launch_dependents`, or the end of a program."""
        self._early |= program not in self._waited

    def end(self) -> None:
        """End a kernel after all of its programs."""
        if any(some.any() for some in self._pending.values()) and not self._waited:
            raise RuntimeError(LATE)

    def read(self, program: Any, part: Tensor) -> None:
        """Check a program's read of a view."""
        pending = self._pending.get(_storage(part))
        if pending is None or program in self._waited:
            return
        if pending.as_strided(part.shape, part.stride(), part.storage_offset()).any():
            raise RuntimeError(EARLY)

    def read_at(self, program: Any, storage: Tensor, at: Tensor) -> None:
        """Check a program's read of elements of a storage."""
        pending = self._pending.get(_storage(storage))
        if pending is not None and program not in self._waited and pending[at].any():
            raise RuntimeError(EARLY)
