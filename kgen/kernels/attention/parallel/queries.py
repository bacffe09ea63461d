"""The queries of a rank in the backward pass, and the values that calls with the same queries
share.
"""

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
    """Tensors of all queries of a rank in backward.

    dout: gradient of the output. dlse: gradient of the base-2 log-sum-exp, or None. out, lse:
    results of forward.
    """

    dout: Tensor
    dlse: Tensor | None
    out: Tensor
    lse: Tensor
    q: Tensor


@dataclass(frozen=True)
class Part:
    """The queries of one call: `rows` of the tensors of a rank.

    `shared` has delta and the sum of dq, which all calls with these queries use, or None.
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
    """All queries of a rank, in adjacent runs.

    If the kernels add dq to one shared sum, each call gets all queries of a run. It visits those
    that see its keys. Delta is then computed once, dq is rounded once, and no parts of dq have to
    be summed.
    """

    def __init__(self, plan: Plan, rank: int, axis: int, tensors: Attended) -> None:
        self.plan, self.rank, self.axis, self.tensors = plan, rank, axis, tensors
        self.begun: dict[Interval, Part] | None = None

    def begin(
        self, module: Any, name: str, k: Tensor, v: Tensor, sinks: Tensor | None, total: Sum
    ) -> Tensor | None:
        """Begin shared sums of dq, if the kernels have them for about as many keys as `k` has.

        Only the first call has an effect. The sums replace parts of `total`. Returns the gradient
        of the sinks from these queries, or None.
        """
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
            total.whole = None  # so that a first part with all rows need not be copied
        return found

    def of(self, pair: Pair) -> Part:
        """Return the queries of a pair, or all queries of their run if calls share it."""
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
        """Return the rows without shared sums."""
        return without(rows, [part.rows for part in (self.begun or {}).values()])

    def end(self, module: Any, name: str, scale: float, total: Sum) -> None:
        """Write the shared sums of dq into `total`."""
        for part in (self.begun or {}).values():
            getattr(module, f"{name}_end")(part.shared, scale)
            total.add(part.rows, part.shared.dq, placed=True)
