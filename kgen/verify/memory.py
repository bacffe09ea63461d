"""Memory checks for Triton's interpreter: kernels may only access the tensors of their launch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy
import torch


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """Yield a list of accesses outside the tensors of a launch. These accesses are suppressed.

    Without the interpreter, nothing is checked.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield []
        return
    import triton.runtime.interpreter as interpreter

    memory, called = Memory(interpreter._interpreter), interpreter.GridExecutor.__call__

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        # descriptors have a base tensor
        given = (getattr(x, "base", x) for x in (*args, *kwargs.values()))
        spans = {_span(x) for x in given if isinstance(x, torch.Tensor)}
        memory.spans = sorted((first, last) for first, last in spans if first <= last)
        called(self, *args, **kwargs)

    with (
        mock.patch.object(interpreter, "_interpreter", memory),
        mock.patch.object(interpreter.GridExecutor, "__call__", launched),
    ):
        yield memory.outside


def _span(x: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first and last element; an empty range for an empty tensor."""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
    return x.data_ptr(), x.data_ptr() + last * x.element_size()


class Memory:
    """Replacement of Triton's functions that access memory."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.spans: list[tuple[int, int]] = []
        self.outside: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def _live(self, what: str, pointers: Any, mask: Any) -> Any:
        """Return the mask without elements outside the tensors."""
        mask = numpy.asarray(mask)
        live = pointers[mask]
        # One tensor usually contains all of it.
        low, high = (live.min(), live.max()) if live.size else (0, -1)
        if low > high or any(first <= low and high <= last for first, last in self.spans):
            return mask
        at = pointers.astype("int64")
        inside = mask & False
        for first, last in self.spans:
            inside |= (first <= at) & (at <= last)
        if (mask & ~inside).any():
            self.outside.append(what)
        return mask & inside

    def load(self, pointers: Any, mask: Any, *rest: Any) -> Any:
        return self.real.load(pointers, self._live("read", pointers, mask), *rest)

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        return self.real.store(pointers, values, self._live("written", pointers, mask))

    def atomic_rmw(self, how: Any, pointers: Any, values: Any, mask: Any, order: Any) -> Any:
        return self.real.atomic_rmw(
            how, pointers, values, self._live("added to", pointers, mask), order
        )
