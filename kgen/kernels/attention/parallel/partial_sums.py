"""Sums of parts, by rows.

A single part stays as its kernel stored it; several are summed in one pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from .merging import SMALL, merge
from .sharding import Interval, without

LOG2 = math.log(2)
WAITING = 3
"""Number of parts of a row that may wait for their sum. This limits memory."""

Part = tuple[Tensor, Optional[Tensor]]  # noqa: UP045
"""Rows of a sum, and their log-sum-exp if outputs are merged."""


@dataclass(frozen=True)
class _Run:
    """Rows with the same parts. `in_place`: the first part is a view of the result."""

    rows: Interval
    parts: tuple[Part, ...]
    in_place: bool = False

    def cut(self, rows: Interval, axis: int) -> _Run:
        """Return some of these rows."""
        if rows == self.rows:
            return self
        inner = rows[0] - self.rows[0], rows[1] - self.rows[0]
        parts = (
            (run_of(x, axis, inner), lse if lse is None else run_of(lse, -1, inner))
            for x, lse in self.parts
        )
        return _Run(rows, tuple(parts), self.in_place)


class Sum:
    """A float32 sum of parts, each of some rows along `axis`.

    The result has this shape, and the dtype and device of `like`. Outputs are added with their
    log-sum-exp, by which they are merged.
    """

    def __init__(self, shape: Sequence[int], like: Tensor, axis: int) -> None:
        self.shape, self.like, self.axis = tuple(shape), like, axis
        self.whole: Part | None = None
        self.runs: list[_Run] = []

    def free(self, rows: Interval) -> list[Interval]:
        """Return the runs of these rows that no part covers yet."""
        return without([rows], [run.rows for run in self.runs])

    def room(self, rows: Interval) -> Tensor:
        """Return a view of these rows of the result, to write a part there."""
        if self.whole is None:
            self.whole = empty(self.shape, self.like), None
        return run_of(self.whole[0], self.axis, rows)

    def add(
        self, rows: Interval, part: Tensor, lse: Tensor | None = None, placed: bool = False
    ) -> None:
        """Add a part, with contiguous columns, which the sum may overwrite.

        `placed`: it is the view from `room`.
        """
        first = (
            self.whole is None
            and rows == (0, self.shape[self.axis])
            and part.dtype == self.like.dtype
        )
        first = first and part.stride() == strides(self.shape, self.like)
        if first:
            self.whole = part, lse
        new = _Run(rows, ((part, lse),), first or placed)
        found = [new.cut(run, self.axis) for run in self.free(rows)]
        for old in self.runs:
            both = max(old.rows[0], rows[0]), min(old.rows[1], rows[1])
            if both[0] >= both[1]:
                found.append(old)
                continue
            found += [old.cut(run, self.axis) for run in without([old.rows], [both])]
            before = old.cut(both, self.axis)
            parts = before.parts, new.cut(both, self.axis).parts
            run = _Run(
                both,
                sum(parts[::-1] if new.in_place else parts, ()),
                before.in_place or new.in_place,
            )
            found.append(self._added_up(run) if len(run.parts) > WAITING else run)
        self.runs = found

    def _added_up(self, run: _Run) -> _Run:
        length, lse = run.rows[1] - run.rows[0], run.parts[0][1]
        shape = [*self.shape]
        shape[self.axis] = length
        total = (
            self.like.new_empty(shape, dtype=torch.float32),
            lse if lse is None else torch.empty_like(lse, memory_format=torch.contiguous_format),
        )
        _write(total, run)
        return _Run(run.rows, (total,))

    def parts(self, rows: Interval) -> Iterator[tuple[Interval, Tensor]]:
        """Yield the parts that cover some rows, with their rows."""
        for run in self._within(rows):
            for part, _ in run.parts:
                yield run.rows, part

    def alone(self, rows: Interval) -> Tensor | None:
        """Return the only part of these rows if it covers them and has the result's dtype,
        otherwise None.
        """
        parts = list(self.parts(rows))
        if len(parts) == 1 and parts[0][0] == rows and parts[0][1].dtype == self.like.dtype:
            return parts[0][1]
        return None

    def write(self, rows: Interval, out: Tensor) -> None:
        """Write the sum of some rows into `out`; rows without a part are zero."""
        for lo, hi in self.free(rows):
            run_of(out, self.axis, (lo - rows[0], hi - rows[0])).zero_()
        for run in self._within(rows):
            _write(_Run(rows, ((out, None),)).cut(run.rows, self.axis).parts[0], run)

    def _within(self, rows: Interval) -> Iterator[_Run]:
        for run in self.runs:
            lo, hi = max(run.rows[0], rows[0]), min(run.rows[1], rows[1])
            if lo < hi:
                yield run.cut((lo, hi), self.axis)

    def result(self) -> Tensor:
        """Return all rows; rows without a part are zero."""
        out = self.whole[0] if self.whole is not None else empty(self.shape, self.like)
        self._write_all((out, None))
        return out

    def wide(self) -> Tensor:
        """Return all rows in float32, contiguous; rows without a part are zero."""
        out = self.like.new_empty(self.shape, dtype=torch.float32)
        self.write((0, self.shape[self.axis]), out)
        return out

    def attended(self) -> tuple[Tensor, Tensor]:
        """Return outputs and their log-sum-exps [.., H, S]; rows without a part have 0 and -inf."""
        if self.whole is None:
            rows = self.shape[:3] if len(self.shape) == 4 else (self.shape[1], self.shape[0])
            # The kernels compute float32 probabilities from a float64 log-sum-exp.
            dtype = torch.float64 if self.like.dtype == torch.float32 else torch.float32
            out, lse = (
                empty(self.shape, self.like),
                self.like.new_full(rows, -math.inf, dtype=dtype),
            )
        else:
            out, of_whole = self.whole
            assert of_whole is not None
            lse = of_whole
        self._write_all((out, lse))
        return out, lse

    def _write_all(self, out: Part) -> None:
        whole = _Run((0, self.shape[self.axis]), (out,))
        for rows in self.free(whole.rows):
            run_of(out[0], self.axis, rows).zero_()
        for run in self.runs:
            if not (run.in_place and len(run.parts) == 1):
                _write(whole.cut(run.rows, self.axis).parts[0], run)


def _write(out: Part, run: _Run) -> None:
    total, lse = out
    lses = [x for _, x in run.parts if x is not None]
    merge(total, [part for part, _ in run.parts], lse if lses else None, lses)


def copied(out: Tensor, x: Tensor) -> None:
    """Copy `x` into `out`."""
    if x.stride(-1) == 1 and x.numel() > SMALL:
        merge(out, [x])
    else:
        out.copy_(x)


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return an uninitialized tensor in the memory order of `like`: [B, S, H, D], or the order of
    the shape.
    """
    return like.new_empty_strided(tuple(shape), strides(shape, like))


def strides(shape: Sequence[int], like: Tensor) -> tuple[int, ...]:
    """Return the strides of `empty`."""
    order = [*range(len(shape))]
    if len(shape) == 4 and like.stride(1) < like.stride(2):
        order = [0, 2, 1, 3]
    found, step = [0] * len(shape), 1
    for i in reversed(order):
        found[i] = step
        step *= shape[i]
    return tuple(found)


def run_of(x: Tensor, axis: int, rows: Interval) -> Tensor:
    """Return a view of some rows of a tensor."""
    return x.narrow(axis, rows[0], rows[1] - rows[0])
