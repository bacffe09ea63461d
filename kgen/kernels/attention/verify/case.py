"""Cases of attention kernels: a name and the numbers of one call."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Case:
    """One call of the kernel.

    `layout`: one of `LAYOUTS`, for q, k, v and the buffers.
    `dout`: `contiguous`, `strided`, `expanded` or `none` (gradient through the log-sum-exp only).
    `ints`: values of unsorted integer and bool buffers. `mixed`, `runs` (of equal numbers along
    positions), `zero`, `past` (beyond every length) or `wide` (64-bit buffers, also sorted ones,
    differ in their high halves). `hidden`: rows of K and V that no query sees at any position hold
    NaN. `edge`: index of the values of run-time parameters.
    `lse`: return the log-sum-exp, with a gradient through it.
    `packed`: lengths (queries, keys) of packed sequences; the longest are `sq` and `sk`.
    `tail`: numbers of tokens after the last sequence.
    `unread`: buffer elements that no visible pair reads hold NaN and infinities.
    `any_size`: size of the axes `any` of buffers. None for about half the longest length.
    """

    name: str
    sq: int
    sk: int
    batch: int = 1
    heads_kv: int = 1
    group: int = 1
    layout: str = "contiguous"
    dout: str = "contiguous"
    magnitude: float = 1.0
    scale: float | None = None
    lse: bool = False
    ints: str = "mixed"
    hidden: bool = False
    edge: int = 0
    learned: tuple[str, ...] = ()
    """Names of the required gradients. Empty for all."""
    few: bool = False
    """Use as few heads as the spec allows, because only the lengths matter."""
    ties: bool = False
    """q and k are integer multiples of `magnitude`, so scores are exact, and equal or far apart."""
    packed: tuple[tuple[int, int], ...] = ()
    tail: tuple[int, int] = (0, 0)
    unread: bool = False
    any_size: int | None = None

    @property
    def cu_seqlens(self) -> tuple[list[int], list[int]]:
        """Offsets of the packed sequences in the queries and in the keys, including the end."""
        queries, keys = ([lengths[i] for lengths in self.packed] for i in (0, 1))
        return [0, *accumulate(queries)], [0, *accumulate(keys)]

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by the names in buffer shapes and expressions."""
        heads = self.heads_kv * self.group
        batch = len(self.packed) or self.batch
        return {"B": batch, "HQ": heads, "HKV": self.heads_kv, "SQ": self.sq, "SK": self.sk}
