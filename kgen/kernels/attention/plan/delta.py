"""The delta of attention backward, rowsum(dO * O): how threads share a row, and how much each has in flight.

Timed on an H200 for head dims 64 and 128 (docs/performance/delta.md): small blocks and two 16-byte loads of each
operand in flight for each thread reach the rate of a copy; more loads leave too few warps, fewer too little in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.kernels.attention.spec import AttentionSpec
from kgen.sizes import ELEMENT_SIZE

ACCESS = 16
"""Bytes of the widest access."""


@dataclass(frozen=True)
class DeltaPlan:
    """`vector` elements are an access, `threads` make a block, a thread works on `rows_per_thread` rows at once."""

    vector: int
    threads_per_row: int
    threads: int
    rows_per_thread: int

    @property
    def rows(self) -> int:
        """Rows that a block takes."""
        return self.threads // self.threads_per_row * self.rows_per_thread


def plan_delta(spec: AttentionSpec) -> DeltaPlan:
    """Eight threads for each row, more for rows that would take more than two loads of each."""
    vector = ACCESS // ELEMENT_SIZE[spec.dtype]
    accesses = -(-spec.head_dim.v // vector)
    threads = 8
    while threads < 32 and accesses > 2 * threads:
        threads *= 2
    loads = -(-accesses // threads)
    return DeltaPlan(vector, threads, 128, max(1, 2 // loads))
