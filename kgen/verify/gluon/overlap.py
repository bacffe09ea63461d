"""Programmatic dependent launches on the CPU, where kernels run one after the other.

A kernel that is launched so begins beside the end of the launch ahead of it, as soon as all programs of that one say so
or end. Until a program has waited (`gdc_wait`), it may not read what the launch ahead wrote; nor what the one before
that wrote, if a program of the launch ahead let others begin before it had waited itself. A program that waits knows
the launch ahead to be done, so that one has to, or what comes next would not wait for that launch either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Elements = dict[int, Tensor]
"""By storage, for each element of it, whether it is one of them."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
EARLY = "read before the launch ahead is known to be done"
LATE = "over before the launch ahead is known to be"


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage().data_ptr())


def _bits(x: Tensor) -> Tensor:
    """All elements of its storage."""
    count = x.untyped_storage().nbytes() // x.element_size()
    return x.detach().as_strided((count,), (1,), 0).view(BITS[x.element_size()])


def _both(some: Elements, others: Elements) -> Elements:
    found = {**some, **others}
    return found | {key: some[key] | others[key] for key in some.keys() & others.keys()}


class Overlap:
    """What may still be under way."""

    def __init__(self) -> None:
        self._written: Elements = {}
        self._pending: Elements = {}
        self._waited: set[Any] = set()
        self._early = False

    def following(self, launch: Callable[[], None], tensors: Iterable[Tensor]) -> None:
        """A launch of any kernel, of these tensors: what it writes."""
        there = {_storage(x): x for x in tensors if x.numel()}
        before = {key: _bits(x).clone() for key, x in there.items()}
        self._pending, self._early = {}, False
        launch()
        written = {key: _bits(x) != before[key] for key, x in there.items()}
        self._written = _both(written, self._pending if self._early else {})

    def begin(self, beside: bool, filled: Iterable[Tensor] = ()) -> None:
        """A kernel: `beside` the launch ahead, or beside what `filled` these."""
        fills = {_storage(x): torch.ones_like(_bits(x), dtype=torch.bool) for x in filled}
        self._pending = (fills or self._written) if beside else {}
        self._waited.clear()

    def wait(self, program: Any) -> None:
        """`gdc_wait`."""
        self._waited.add(program)

    def let_begin(self, program: Any) -> None:
        """`gdc_launch_dependents`, which the end of a program says, too."""
        self._early |= program not in self._waited

    def end(self) -> None:
        """The kernel, whose programs have all ended."""
        if any(some.any() for some in self._pending.values()) and not self._waited:
            raise RuntimeError(LATE)

    def read(self, program: Any, part: Tensor) -> None:
        """A view of a tensor, by a program."""
        pending = self._pending.get(_storage(part))
        if pending is None or program in self._waited:
            return
        if pending.as_strided(part.shape, part.stride(), part.storage_offset()).any():
            raise RuntimeError(EARLY)

    def read_at(self, program: Any, storage: Tensor, at: Tensor) -> None:
        """Elements of a storage, by a program."""
        pending = self._pending.get(_storage(storage))
        if pending is not None and program not in self._waited and pending[at].any():
            raise RuntimeError(EARLY)
