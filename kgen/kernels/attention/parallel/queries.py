"""The queries of a rank in the backward pass, and what calls with the same of them share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from .partial_sums import Sum, run_of
from .planning import Pair, Plan
from .sharding import Interval, without


@dataclass(frozen=True)
class Attended:
    """What backward has of all queries of a rank: gradients of outputs, these, their log-sum-exps, and the queries."""

    dout: Tensor
    dlse: Tensor | None
    out: Tensor
    lse: Tensor
    q: Tensor


@dataclass(frozen=True)
class Part:
    """The queries of one call: `rows` of a rank's tensors, and what these have there.

    `shared`: what all calls with these queries have in common, delta and one sum of dq that each adds to.
    """

    pair: Pair
    rows: Interval
    dout: Tensor
    dlse: Tensor | None
    out: Tensor
    lse: Tensor
    q: Tensor
    shared: Any = None


class Queries:
    """All queries of a rank, in runs side by side.

    Where kernels of parts add dq to one sum, each call has all queries of a run, of which it visits those that see its
    keys: then delta is computed once, dq is rounded once, and nothing has to be added up.
    """

    def __init__(self, plan: Plan, rank: int, axis: int, tensors: Attended) -> None:
        self.plan, self.rank, self.axis, self.tensors = plan, rank, axis, tensors
        self.begun: dict[Interval, Part] | None = None

    def begin(
        self, module: Any, name: str, k: Tensor, v: Tensor, sinks: Tensor | None, total: Sum
    ) -> Tensor | None:
        """Begin sums of dq, where kernels for about as many keys as these have them: in place of what they are of
        `total`. Gives the gradient of sinks of these queries, which is theirs alone. Once."""
        if self.begun is not None:
            return None
        self.begun = {}
        make = getattr(module, f"{name}_begin", None)
        found = None
        if make is None:
            return found
        for run in self.plan.q.joined.parts[self.rank]:
            part = self.of(Pair(self.rank, self.rank, run, run))
            dq = total.room(part.rows)
            given = [] if sinks is None else [sinks]
            shared = make(part.dout, part.dlse, part.out, part.lse, part.q, k, v, *given, dq)
            if shared is None:
                continue
            self.begun[run] = replace(part, dout=shared.dout, shared=shared)
            if sinks is not None:
                found = shared.d_sinks if found is None else found + shared.d_sinks
        if not self.begun:
            total.whole = None  # the first part of all rows stays where its kernel stored it
        return found

    def of(self, pair: Pair) -> Part:
        """The queries of a pair; with all of their run where calls share it."""
        for (lo, hi), part in (self.begun or {}).items():
            if lo <= pair.q[0] and pair.q[1] <= hi:
                return replace(part, pair=replace(pair, q=(lo, hi)))
        rows = self.plan.q.rows(self.rank, *pair.q)
        all_rows = self.tensors
        return Part(
            pair,
            rows,
            run_of(all_rows.dout, self.axis, rows),
            None if all_rows.dlse is None else run_of(all_rows.dlse, -1, rows),
            run_of(all_rows.out, self.axis, rows),
            run_of(all_rows.lse, -1, rows).contiguous(),
            run_of(all_rows.q, self.axis, rows),
        )

    def unshared(self, rows: Sequence[Interval]) -> list[Interval]:
        """Those rows whose calls share nothing."""
        return without(rows, [part.rows for part in (self.begun or {}).values()])

    def end(self, module: Any, name: str, scale: float, total: Sum) -> None:
        """What calls added to sums of dq is dq."""
        for part in (self.begun or {}).values():
            getattr(module, f"{name}_end")(part.shared, scale)
            total.add(part.rows, part.shared.dq, placed=True)
