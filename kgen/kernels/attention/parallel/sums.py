"""Sums over parts, by rows: what one part alone covers stays as its kernel stored it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .merging import merge
from .planning import Interval, without

LOG2 = math.log(2)


@dataclass(frozen=True)
class _Piece:
    rows: Interval
    tensor: Tensor
    in_place: bool
    """Whether it is a view of what is returned."""

    def cut(self, rows: Interval, axis: int) -> _Piece:
        inner = rows[0] - self.rows[0], rows[1] - self.rows[0]
        return self if rows == self.rows else _Piece(rows, run_of(self.tensor, axis, inner), self.in_place)


class Sum:
    """A tensor of this shape, and of the dtype and device of `like`, that parts of its rows along `axis` add up to.

    Rows that several parts cover are added up in float32; where `few` says that there are three at most, in their own
    dtype, which rounds once more, as each part was.
    """

    def __init__(self, shape: Sequence[int], like: Tensor, axis: int, few: bool = False) -> None:
        self.shape, self.like, self.axis, self.few = tuple(shape), like, axis, few
        self.whole: Tensor | None = None
        self.pieces: list[_Piece] = []

    def free(self, rows: Interval) -> list[Interval]:
        """The rows of these that no part covers yet."""
        return without([rows], [piece.rows for piece in self.pieces])

    def put(self, rows: Interval, part: Tensor, join: Callable[[Tensor, Tensor, Interval], None]) -> None:
        """Add a part, which is taken over; `join` puts rows of it into those of a sum."""
        if not self.pieces and rows == (0, self.shape[self.axis]) and part.dtype == self.like.dtype:
            self.whole = part
        new = _Piece(rows, part, self.whole is part)
        pieces = [new.cut(run, self.axis) for run in self.free(rows)]
        for old in self.pieces:
            both = max(old.rows[0], rows[0]), min(old.rows[1], rows[1])
            if both[0] >= both[1]:
                pieces.append(old)
                continue
            pieces += [old.cut(run, self.axis) for run in without([old.rows], [both])]
            total = old.cut(both, self.axis)
            if not self.few and total.tensor.dtype != torch.float32:
                total = _Piece(both, total.tensor.float(), in_place=False)
            join(total.tensor, new.cut(both, self.axis).tensor, both)
            pieces.append(total)
        self.pieces = pieces

    def result(self) -> Tensor:
        """All rows; zeros where no part was."""
        if self.whole is None:
            return self.rows((0, self.shape[self.axis]))
        for piece in self.pieces:
            if not piece.in_place:
                run_of(self.whole, self.axis, piece.rows).copy_(piece.tensor)
        return self.whole

    def rows(self, rows: Interval) -> Tensor:
        """Some rows; a view where one part has them all."""
        inside = [(max(p.rows[0], rows[0]), min(p.rows[1], rows[1]), p) for p in self.pieces]
        pieces = [piece.cut((lo, hi), self.axis) for lo, hi, piece in inside if lo < hi]
        if len(pieces) == 1 and pieces[0].rows == rows:
            return pieces[0].tensor.to(self.like.dtype)
        shape = [*self.shape]
        shape[self.axis] = rows[1] - rows[0]
        total = (self.like.new_zeros if self.free(rows) else self.like.new_empty)(shape)
        for piece in pieces:
            lo, hi = piece.rows
            run_of(total, self.axis, (lo - rows[0], hi - rows[0])).copy_(piece.tensor)
        return total


class Gradient(Sum):
    """A sum of gradients of a tensor."""

    def __init__(self, of: Tensor, axis: int, few: bool = False) -> None:
        super().__init__(of.shape, of, axis, few)

    def add(self, rows: Interval, gradient: Tensor) -> None:
        """Of some rows."""
        self.put(rows, gradient, lambda total, part, _: total.add_(part))


class Attended(Sum):
    """Outputs of parts of the keys, merged: a mean, weighted by their sums of exponentials."""

    lse: Tensor | None = None

    def add(self, rows: Interval, out: Tensor, lse: Tensor) -> None:
        """What some rows make of some keys."""
        if self.lse is None and rows == (0, self.shape[self.axis]):
            self.lse = lse
        else:
            total = self._lse()
            for lo, hi in self.free(rows):
                run_of(total, -1, (lo, hi)).copy_(run_of(lse, -1, (lo - rows[0], hi - rows[0])))

        def join(total: Tensor, part: Tensor, both: Interval) -> None:
            at = both[0] - rows[0], both[1] - rows[0]
            merge(total, run_of(self._lse(), -1, both), part, run_of(lse, -1, at))

        self.put(rows, out, join)

    def _lse(self) -> Tensor:
        if self.lse is None:
            rows = self.shape[:3] if len(self.shape) == 4 else (self.shape[1], self.shape[0])
            self.lse = self.like.new_full(rows, -math.inf, dtype=torch.float32)
        return self.lse

    def attended(self) -> tuple[Tensor, Tensor]:
        """Of all keys; zeros and -inf where there are none."""
        return self.result(), self._lse()


def run_of(x: Tensor, axis: int, rows: Interval) -> Tensor:
    """Some rows of a tensor, as a view."""
    return x.narrow(axis, rows[0], rows[1] - rows[0])
