"""Integers as sums of multiples: `2 * (q_idx - kv_idx) + 3` is {q_idx: 2, kv_idx: -2} and 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

from kgen.expr.algebra import call
from kgen.expr.nodes import Call, Const, Node, Type, variables
from kgen.expr.unparse import show

POSITIONS = ("q_idx", "kv_idx")


@dataclass(frozen=True)
class Affine:
    """A sum of multiples of nodes, and a number. No factor is zero."""

    terms: Mapping[Node, int]
    number: int = 0

    def __add__(self, other: Affine) -> Affine:
        terms = dict(self.terms)
        for node, factor in other.terms.items():
            terms[node] = terms.get(node, 0) + factor
        return Affine({n: f for n, f in terms.items() if f}, self.number + other.number)

    def times(self, factor: int) -> Affine:
        """Every part of it, as often."""
        return (
            Affine({n: f * factor for n, f in self.terms.items()}, self.number * factor)
            if factor
            else Affine({})
        )

    def divisor(self) -> int:
        """What divides all factors, but not the number; 1 without factors."""
        return gcd(*self.terms.values()) or 1

    def of_positions(self) -> frozenset[str]:
        """The positions that it moves with."""
        return frozenset().union(*map(variables, self.terms)) & {*POSITIONS}

    def first(self) -> Node:
        """The term that decides on a sign."""
        return min(self.terms, key=order)

    def tree(self) -> Node:
        """The sum as it is written: what is added, by `order`, then what is subtracted; the number last."""
        terms = sorted(self.terms.items(), key=lambda term: (term[1] < 0, order(term[0])))
        total: Node | None = None
        for node, factor in terms:
            part = node if abs(factor) == 1 else call("mul", Const(abs(factor), Type.INT), node)
            if total is None:
                total = call("neg", part) if factor < 0 else part
            else:
                total = call("add" if factor > 0 else "sub", total, part)
        if total is None:
            return Const(self.number, Type.INT)
        if self.number:
            total = call("add" if self.number > 0 else "sub", total, Const(abs(self.number), Type.INT))
        return total


def affine(node: Node, *, expands: bool = True) -> Affine:
    """An integer as a sum of multiples of what is no sum itself; multiples of sums stay as they are unless it expands
    them."""
    match node:
        case Const(value):
            return Affine({}, int(value))
        case Call("add", (a, b)):
            return affine(a, expands=expands) + affine(b, expands=expands)
        case Call("sub", (a, b)):
            return affine(a, expands=expands) + affine(b, expands=expands).times(-1)
        case Call("neg", (a,)):
            return affine(a, expands=expands).times(-1)
        case Call("mul", (Const(value), a) | (a, Const(value))) if expands:
            return affine(a).times(int(value))
        case Call("lshift", (a, Const(int(bits)))) if expands and 0 <= bits < 32:
            return affine(a).times(2**bits)
    return Affine({node: 1})


def is_large(total: Affine) -> bool:
    """Whether a number or a factor of a sum is beyond 32 bits."""
    return max(map(abs, (total.number, *total.terms.values()))) >= 2**31


def order(node: Node) -> tuple[int, str]:
    """Positions first, queries before keys; then what moves with them, and what does not."""
    names = variables(node)
    moves = (2 if "q_idx" in names else 3) if names & {*POSITIONS} else 4
    rank = {name: rank for rank, name in enumerate(POSITIONS)}
    text = show(node)
    return rank.get(text, moves), text
