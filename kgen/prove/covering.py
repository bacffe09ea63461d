"""Claims that programs store each element of a tensor exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations_with_replacement
from typing import Any

import z3

from kgen.prove.digits import Monomial, monomials
from kgen.prove.lanes import Data, constants, parts_of
from kgen.prove.records import Access, Digits
from kgen.prove.running import KernelWalker

Pairs = list[tuple[Any, Any]]


def applied(terms: Sequence[Any], function: str) -> list[Any]:
    """Return the elements of a tensor in terms, each once."""
    return [one for one in parts_of(terms) if one.num_args() and one.decl().name() == function]


def varying(kernel: KernelWalker) -> dict[str, Any]:
    """Return the unknowns that differ between programs and steps of loops, apart from lanes."""
    found = {str(of.term): of.term for of in kernel.digits.values()}
    return found | {str(count): count for count in kernel.loops}


def apart(kernel: KernelWalker, stores: Sequence[Access]) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield for each pair of stores of a tensor the claim that they write different elements.

    A store is compared with itself in another program, lane or step, unless both store the same
    value. Each claim has its facts.
    """
    for a, b in combinations_with_replacement(stores, 2):
        own = {*constants([*a.indices, a.when]), *constants([*b.indices, b.when])}
        moving = varying(kernel)
        lanes = {n: z3.Int(n) for n in own if n.startswith("lane")}
        pairs = [(term, z3.Int(f"{name}'")) for name, term in (moving | lanes).items()]
        there = [z3.substitute(i, *pairs) for i in b.indices]
        facts = [*kernel.facts, *(z3.substitute(fact, *pairs) for fact in kernel.facts)]
        facts += [a.when, z3.substitute(b.when, *pairs)]
        facts += _ordered(kernel, pairs)
        equal = z3.And(*(i == j for i, j in zip(a.indices, there, strict=True)))
        if a is b:
            steps = [*lanes.values(), *(c for c in kernel.loops if str(c) in own)]
            same = z3.And(_same(kernel, pairs), *(z3.substitute(s, *pairs) == s for s in steps))
            if isinstance(a.value, Data) and a.value.names is not None:  # equal values are no race
                read = [*lanes.values(), *(moving[n] for n in a.value.names & moving.keys())]
                same = z3.Or(same, z3.And(*(z3.substitute(x, *pairs) == x for x in read)))
            yield f"line {a.line}: {a.text}", z3.Implies(equal, same), facts
        else:
            yield f"lines {a.line} and {b.line}: {b.text}", z3.Not(equal), facts


def _ordered(kernel: KernelWalker, pairs: Pairs) -> list[Any]:
    """Return the order of the products of two programs, which z3 cannot derive."""
    found = []
    for a, size in kernel.lemmas:
        other = z3.substitute(a, *pairs)
        found += [
            z3.Implies(a < other, (a + 1) * size <= other * size),
            z3.Implies(other < a, (other + 1) * size <= a * size),
        ]
    return found


def _same(kernel: KernelWalker, pairs: Pairs) -> Any:
    """Return the condition that two programs are one: the digits of their numbers are equal."""

    def equal(term: Any) -> Any:
        of = kernel.digits.get(term.get_id())
        splits = () if of is None else of.splits
        ways = [z3.And(equal(top), equal(rest)) for top, rest in splits]
        return z3.Or(term == z3.substitute(term, *pairs), *ways)

    return equal(z3.Int("pid"))


# --- every element ------------------------


def reached(
    kernel: KernelWalker, access: Access, wanted: Sequence[Any], known: Mapping[str, Any]
) -> tuple[Any, list[Any]]:
    """Return the claim that an access has the wanted indices, and its facts.

    The claim names program, lane and step of the access. `known` has those unknowns that are chosen
    beforehand, by name.
    """
    search = _Search(kernel, access, dict(known))
    return search.claim(wanted), search.facts


class _Search:
    """Find the program, lane and step of an access that has some indices."""

    def __init__(self, kernel: KernelWalker, access: Access, chosen: dict[str, Any]) -> None:
        self.kernel, self.access, self.chosen = kernel, access, chosen
        self.moving = varying(kernel)
        self.by_index = set[str]()
        self.facts: list[Any] = []

    def claim(self, wanted: Sequence[Any]) -> Any:
        """Return the condition that the choice is possible, and has the wanted indices."""
        access = self.access
        for index, value in zip(access.indices, wanted, strict=True):
            self._solve(self._put(index), value)
        self.by_index = set(self.chosen)
        self._rest()
        equal = [self._put(i) == x for i, x in zip(access.indices, wanted, strict=True)]
        return z3.And(*equal, self._put(access.when), *self._bounds())

    def _put(self, term: Any) -> Any:
        names = constants([term])
        pairs = [(names[n], value) for n, value in self.chosen.items() if n in names]
        return z3.substitute(term, *pairs)

    def _open(self, term: Any) -> list[str]:
        """Return the unknowns of a term that are not yet chosen."""
        found = constants([term])
        return [
            n
            for n in found
            if n not in self.chosen and (n in self.moving or n.startswith("lane")) and "?" not in n
        ]

    def _solve(self, index: Any, value: Any) -> None:
        """Choose the unknowns of an index, as digits of its value."""
        parts: list[tuple[Monomial, str]] = []
        for part in monomials(index):
            names = self._open(part.term)
            if not names:
                value = value - part.term
                continue
            variable = next((f for f in part.factors if str(f) == names[0]), None)
            if len(names) > 1 or variable is None:
                return
            found = part / Monomial(1, (variable,))
            assert found is not None
            parts.append((found, names[0]))
        parts.sort(key=lambda pair: (len(pair[0].factors), pair[0].number), reverse=True)
        for number, (by, name) in enumerate(parts):
            sign = -1 if any(later.number < 0 for later, _ in parts[number + 1 :]) else 1
            if by.number in (1, -1) and not by.factors:
                self.chosen[name] = by.number * value
                value = z3.IntVal(0)
            elif by.factors:
                top, rest = self._unknown(name), self._unknown(f"{name} rest")
                self.facts += [value == top * by.term + sign * rest, rest >= 0, rest < by.term]
                self._follows(name, top, by.term)
                self.chosen[name], value = top, sign * rest
            else:
                self.chosen[name] = value / by.number
                value = value % by.number

    def _unknown(self, name: str) -> Any:
        """Return an unknown of this search."""
        return z3.FreshInt(f"{name}?")

    def _follows(self, name: str, top: Any, by: Any) -> None:
        """Add the bound of a quotient, which z3 cannot derive from a product."""
        of = next((d for d in self.kernel.digits.values() if str(d.term) == name), None)
        if of is not None:
            limit = of.limit.term
            self.facts.append(z3.Implies(top >= limit, top * by >= limit * by))
            self.facts.append(z3.Implies(top < 0, top * by <= -by))
            self.facts.append(z3.Implies(top < limit, (top + 1) * by <= limit * by))

    def _rest(self) -> None:
        """Choose the digits that no index has: parts of chosen numbers, and zero for others."""
        digits = list(self.kernel.digits.values())
        for of in digits:
            if (name := str(of.term)) in self.chosen:
                for top, rest in of.splits:
                    self._parts_of(self.chosen[name], top, rest)
        for of in digits:
            if not of.splits:
                self.chosen.setdefault(str(of.term), z3.IntVal(0))
        for of in reversed(digits):
            if str(of.term) not in self.chosen:
                top, rest = self._main(of)
                size = self.kernel.digits[rest.get_id()].limit.term
                values = (self.chosen[str(one)] for one in (top, rest))
                high, low = values
                self.chosen[str(of.term)] = size * high + low

    def _parts_of(self, value: Any, top: Any, rest: Any) -> None:
        """Choose quotient and remainder of a chosen number."""
        if str(top) in self.chosen or str(rest) in self.chosen:
            return
        size = self.kernel.digits[rest.get_id()].limit.term
        high, low = self._unknown(str(top)), self._unknown(str(rest))
        self.facts += [value == size * high + low, low >= 0, low < size]
        self._follows(str(top), high, size)
        self.chosen |= {str(top): high, str(rest): low}

    def _main(self, of: Digits) -> tuple[Any, Any]:
        """Return the quotient and the remainder of which most digits are chosen by an index."""

        def count(term: Any) -> int:
            splits = self.kernel.digits[term.get_id()].splits
            if not splits:
                return int(str(term) in self.by_index)
            return max(count(top) + count(rest) for top, rest in splits)

        return max(of.splits, key=lambda pair: count(pair[0]) + count(pair[1]))

    def _bounds(self) -> Iterator[Any]:
        """Yield the conditions of the choice: digits are in range, and of one number."""
        used = constants([*self.access.indices, self.access.when])
        for name, value in self.chosen.items():
            if name.startswith("lane"):
                yield z3.And(value >= 0, value < int(name.rpartition(".")[2]))
        for of in self.kernel.digits.values():
            value = self.chosen[str(of.term)]
            if not of.splits or str(of.term) in self.by_index:
                yield z3.And(value >= 0, value < of.limit.term)
            for top, rest in of.splits:
                if (top, rest) != self._main(of) and {str(top), str(rest)} & used.keys():
                    size = self.kernel.digits[rest.get_id()].limit.term
                    high, low = self.chosen[str(top)], self.chosen[str(rest)]
                    yield z3.And(value == size * high + low, low >= 0, low < size)
