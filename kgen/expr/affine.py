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
        """Multiply all factors and the number."""
        return (
            Affine({n: f * factor for n, f in self.terms.items()}, self.number * factor)
            if factor
            else Affine({})
        )

    def divisor(self) -> int:
        """Return the greatest common divisor of the factors, without the number; 1 without
        factors.
        """
        return gcd(*self.terms.values()) or 1

    def of_positions(self) -> frozenset[str]:
        """Return the positions that occur in the terms."""
        return frozenset().union(*map(variables, self.terms)) & {*POSITIONS}

    def first(self) -> Node:
        """Return the first term by `order`, whose factor decides the sign of the sum."""
        return min(self.terms, key=order)

    def tree(self) -> Node:
        """Return the sum as a tree: positive terms by `order`, then negative ones, the number
        last.
        """
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
            total = call(
                "add" if self.number > 0 else "sub", total, Const(abs(self.number), Type.INT)
            )
        return total


def affine(node: Node, *, expands: bool = True) -> Affine:
    """Return an integer as a sum of multiples of nodes that are no sums.

    Without `expands`, a multiple of a sum is one term.
    """
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
    """True if the number or a factor does not fit in 32 bits."""
    return max(map(abs, (total.number, *total.terms.values()))) >= 2**31


def order(node: Node) -> tuple[int, str]:
    """Return a sort key: positions first, queries before keys, then terms with positions, then all
    others.
    """
    names = variables(node)
    moves = (2 if "q_idx" in names else 3) if names & {*POSITIONS} else 4
    rank = {name: rank for rank, name in enumerate(POSITIONS)}
    text = show(node)
    return rank.get(text, moves), text
