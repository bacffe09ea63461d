"""Cases for the Hopper kernels in the Gluon interpreter: more tiles than slots, and ranges with
ends at all offsets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kgen.kernels.attention.verify.case import Case


def for_hopper(problem: Any) -> tuple[Case, ...]:
    """Yield the cases of any attention spec."""
    group = 2 if problem.gqa == "any" else int(problem.gqa)
    if problem.varlen:
        return tuple(_packed(group))
    if problem.q_multiple > 1:
        sizes = {"one": (128, 128), "more": (384, 256), "fewer": (128, 384), "dead": (512, 128)}
        return tuple(Case(name, *size, 2, group=group, lse=True) for name, size in sizes.items())
    return tuple(_padded(problem, group))


def _padded(problem: Any, group: int) -> Iterator[Case]:
    # More tiles than slots in the rings, and several tiles of queries for each program; one; rows
    # among others.
    yield Case("long", 450, 450, heads_kv=2, group=group, lse=True)
    yield Case("one", 1, 1, heads_kv=4, group=group)  # four KV heads, each with one tile
    yield Case("whole", 256, 256, group=group)  # no partial tile of queries
    if not problem.tied_lengths:
        # tiles of keys that a causal mask shows to no query
        yield Case("fewer", 70, 400, group=group)
        yield Case("whole-keys", 300, 128, group=group)  # tiles of queries past them, none masked
    # A slope so steep that the row maximum grows a lot between tiles.
    yield Case("steep", 197, 197, 2, 1, group, layout="padded", scale=1.0)
    if problem.key_conjuncts or problem.per_batch:
        # The end may be inside a tile, between tiles, or absent. Keys past it are NaN.
        yield Case("ends", 130, 300, 5, group=group, lse=True, hidden=True)
        yield Case("short", 150, 64, 3, group=group, hidden=True)


def _packed(group: int) -> Iterator[Case]:
    """Yield packed cases: long and empty sequences, more queries than keys and fewer, and tokens
    after the last sequence.
    """

    def case(name: str, *lengths: tuple[int, int], **more: Any) -> Case:
        sq, sk = map(max, zip(*lengths, strict=True))
        return Case(name, sq, sk, group=group, packed=lengths, **more)

    several = ((300, 300), (1, 77), (0, 40), (45, 0), (130, 400), (260, 100))
    yield case("several", *several, heads_kv=2, lse=True)
    yield case("tail", (30, 50), (128, 256), tail=(70, 68), heads_kv=4, lse=True)
    yield case("tail-in-a-tile", (100, 90), tail=(70, 68), lse=True)
    yield case("alone", (70, 90))
    yield case("many", *((i % 4, i % 3) for i in range(130)))
    yield case("steep", (65, 67), (20, 10), heads_kv=2, tail=(1, 2), layout="padded", scale=0.2)
