"""A case of an attention kernel: a name, and the few numbers that make one call."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Case:
    """One call of the kernel.

    `layout` is one of `LAYOUTS`, for q, k, v and the buffers. `dout` is `contiguous`, `strided`,
    `expanded` or `none`: then the gradient comes through the log-sum-exp alone. `ints` says what
    unsorted integer and bool buffers hold: `mixed`, `runs` (of equal numbers along
    the positions), `zero`, `past` (beyond every length) or `wide`: those of 64 bits, sorted ones too, then differ in
    their high halves. `hidden` puts NaN into the rows of K and V that no query can see, whatever its position.
    `edge` picks the run-time params. `lse` asks for the log-sum-exp and sends a
    gradient through it. `packed` are the lengths (queries, keys) of packed sequences, whose longest are `sq` and
    `sk`; `tail` the numbers of tokens after them. `unread` puts NaN and infinities into what no visible pair reads.
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
    """What gradients are asked for; empty for all."""
    few: bool = False
    """As few heads as the spec allows: the case is for its lengths."""
    ties: bool = False
    """q and k are whole multiples of `magnitude`, so that scores are exact, and tie or lie far apart."""
    packed: tuple[tuple[int, int], ...] = ()
    tail: tuple[int, int] = (0, 0)
    unread: bool = False

    @property
    def cu_seqlens(self) -> tuple[list[int], list[int]]:
        """Where each packed sequence begins among the queries and among the keys, and where the last ends."""
        queries, keys = ([lengths[i] for lengths in self.packed] for i in (0, 1))
        return [0, *accumulate(queries)], [0, *accumulate(keys)]

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that buffer shapes and expressions may name."""
        heads = self.heads_kv * self.group
        batch = len(self.packed) or self.batch
        return {"B": batch, "HQ": heads, "HKV": self.heads_kv, "SQ": self.sq, "SK": self.sk}
