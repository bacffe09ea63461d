"""Facts about packed sequences, and the program that processes a token or a slot.

Sequence n begins at slot `cu_seqlens[n] // BT + n`. An obligation of covering takes the sequence of
an element as known. Offsets ascend from 0, so each token before the last offset has one sequence.
The first slots of sequences ascend from 0, too, so each slot has one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import z3

from kgen.kernels.linear_attention.prove.setting import Sizes
from kgen.prove.covering import applied
from kgen.prove.records import Access

OFFSETS = z3.Function("cu_seqlens", z3.IntSort(), z3.IntSort())
OWNERS = z3.Function("seqs", z3.IntSort(), z3.IntSort())
SEQUENCE = z3.Int("sequence")


@dataclass(frozen=True)
class Packed:
    """The packed sequences of a call with chunks of `chunk` tokens."""

    sizes: Sizes
    chunk: int
    slots: Any
    """The number of slots, for all sequences."""

    def first(self, sequence: Any) -> Any:
        """Return the first slot of a sequence."""
        return OFFSETS(sequence) / self.chunk + sequence

    def slot(self, token: Any) -> Any:
        """Return the slot of a token of `SEQUENCE`."""
        return self.first(SEQUENCE) + (token - OFFSETS(SEQUENCE)) / self.chunk

    def valid(self, terms: Sequence[Any]) -> list[Any]:
        """Return that the offsets in terms ascend from 0 to at most T."""
        N, T = self.sizes.N, self.sizes.T
        at = {z3.simplify(one.arg(0)).sexpr(): one.arg(0) for one in applied(terms, "cu_seqlens")}
        found = [OFFSETS(z3.IntVal(0)) == 0]
        for one in at.values():
            value = OFFSETS(one)
            there = z3.And(one >= 0, one <= N)
            found.append(z3.Implies(there, z3.And(value >= 0, value <= T)))
            found.append(z3.Implies(one == 0, value == 0))
            found += [
                z3.Implies(z3.And(one >= 0, one <= other, other <= N), value <= OFFSETS(other))
                for other in at.values()
                if other is not one
            ]
        return found

    def of_token(self, token: Any) -> list[Any]:
        """Return that a token belongs to `SEQUENCE`."""
        begin, end = OFFSETS(SEQUENCE), OFFSETS(SEQUENCE + 1)
        return [SEQUENCE >= 0, SEQUENCE < self.sizes.N, begin <= token, token < end]

    def of_slot(self, slot: Any) -> list[Any]:
        """Return that a slot belongs to `SEQUENCE`. The last sequence has the slots after it."""
        last = SEQUENCE == self.sizes.N - 1
        inside = [self.first(SEQUENCE) <= slot, z3.Or(last, slot < self.first(SEQUENCE + 1))]
        return [SEQUENCE >= 0, SEQUENCE < self.sizes.N, *inside]

    def has_tokens(self, slot: Any) -> list[Any]:
        """Return that a slot of `SEQUENCE` has tokens."""
        length = OFFSETS(SEQUENCE + 1) - OFFSETS(SEQUENCE)
        return [(slot - self.first(SEQUENCE)) * self.chunk < length]

    def chosen(self, access: Access, wanted: Sequence[Any]) -> tuple[dict[str, Any], list[Any]]:
        """Return the program of an element by the names of unknowns, and the facts about it."""
        terms = [*access.indices, access.when]
        owners, offsets = applied(terms, "seqs"), applied(terms, "cu_seqlens")
        for size, index, value in zip(access.sizes, access.indices, wanted, strict=True):
            if z3.simplify(size - self.sizes.T).eq(z3.IntVal(0)) and (owners or offsets):
                facts = self.of_token(value)
                if owners:
                    slot = self.slot(value)
                    return {str(owners[0].arg(0)): slot}, [*facts, OWNERS(slot) == SEQUENCE]
                return self._sequence(index), facts
            if z3.simplify(size - self.slots).eq(z3.IntVal(0)) and applied([index], "cu_seqlens"):
                return self._sequence(index), self.of_slot(value)
        return {}, []

    def _sequence(self, index: Any) -> dict[str, Any]:
        """Return `SEQUENCE` as the number of the sequence that an index reads the offset of."""
        places = [one.arg(0) for one in applied([index], "cu_seqlens")]
        names = [str(place) for place in places if z3.is_const(place)]
        return dict.fromkeys(names[:1], SEQUENCE)
