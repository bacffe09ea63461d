"""Launch shape of the CUDA kernel of delta, rowsum(dO * O) - dlse.

FlashAttention-2 (section 3.1.2) computes this term before the loops of the backward pass.

The numbers come from timings on an H200 for head dims 64 and 128 (docs/performance/delta.md). Small
blocks, with two 16-byte loads of each operand in flight per thread, reach the rate of a copy. More
loads leave too few warps. Fewer loads keep too few bytes in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.kernels.attention.spec import AttentionSpec
from kgen.sizes import ELEMENT_SIZE

ACCESS = 16
"""Bytes of the widest load or store of a thread."""


@dataclass(frozen=True)
class DeltaPlan:
    """Launch shape of the kernel of delta."""

    vector: int
    """Elements per load."""
    threads_per_row: int
    """Threads that share a row."""
    threads: int
    """Threads per block."""
    rows_per_thread: int
    """Rows that a thread processes at a time."""

    @property
    def rows(self) -> int:
        """Rows that a block processes."""
        return self.threads // self.threads_per_row * self.rows_per_thread


def plan_delta(spec: AttentionSpec) -> DeltaPlan:
    """Choose eight threads per row, or more if a thread would otherwise need more than two loads
    per operand.
    """
    vector = ACCESS // ELEMENT_SIZE[spec.dtype]
    accesses = -(-spec.head_dim.v // vector)
    threads = 8
    while threads < 32 and accesses > 2 * threads:
        threads *= 2
    loads = -(-accesses // threads)
    return DeltaPlan(vector, threads, 128, max(1, 2 // loads))
