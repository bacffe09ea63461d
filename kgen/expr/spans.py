"""Pass: merge the spans of a mask's alternatives into as few as possible, in the order of visits.

Two spans with a common start or end become one. Spans whose order is unknown become their hull. The
conditions of two spans on the outer tile may exclude each other. Then one span is empty except in
tiles across the border, and the hull is the other span.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import permutations

from kgen.expr.algebra import call
from kgen.expr.mask_form import conjuncts, normalize
from kgen.expr.nodes import Call, Const, Node, Type, children, substitute

_ZERO = Const(0, Type.INT)


@dataclass(frozen=True)
class Span:
    """Positions of the inner index to visit, `[lo, hi)`, and the part without masking; integer
    scalars of the outer tile.
    """

    lo: Node
    hi: Node
    full_lo: Node
    full_hi: Node
    has_full: bool

    def over(self, names: Mapping[Node, Node]) -> Span:
        """Return the span with some expressions replaced by names."""
        lo, hi, full_lo, full_hi = (
            substitute(bound, names) for bound in (self.lo, self.hi, self.full_lo, self.full_hi)
        )
        return Span(lo, hi, full_lo, full_hi, self.has_full)


@dataclass(frozen=True)
class Given:
    """Conditions on the outer tile only: true for some of its rows (`some`), and for all of them
    (`all`).
    """

    conditions: frozenset[Node]
    some: Node
    all: Node

    def excludes(self, other: Given) -> bool:
        """True if no row satisfies both."""
        return any(
            other.conditions.issuperset(conjuncts(normalize(call("not", c))))
            for c in self.conditions
        )


@dataclass(frozen=True)
class Part:
    """The span of one alternative of a mask, with its conditions on the outer tile."""

    span: Span
    given: Given | None = None


def ascending(parts: Sequence[Part], size: Node) -> tuple[tuple[Span, ...], bool]:
    """Return the spans in order, and True if they are as narrow as the spans of the alternatives.

    If two spans overlap, the later one must start after the earlier one. `size` is the length of
    the inner tensor.
    """
    groups = [[part] for part in _merged(parts)]
    while (pair := next(_unordered(groups), None)) is not None:
        first, second = pair
        groups = [
            [*first, *second] if group is first else group
            for group in groups
            if group is not second
        ]
    groups = sorted(
        groups,
        key=lambda group: sum(_all_before(other, group) for other in groups if other is not group),
    )
    return tuple(_hull(group, size) for group in groups), all(map(_exclusive, groups))


# --- one of two ------------------------


def _merged(parts: Sequence[Part]) -> list[Part]:
    """Merge spans with a common start or end, and any span with one of all or no positions."""
    merged: list[Part] = []
    for part in parts:
        for i, other in enumerate(merged):
            union = _union(other.span, part.span)
            if union is not None:
                merged[i] = Part(union, _either_given(other.given, part.given))
                break
        else:
            merged.append(part)
    return merged


def _either_given(a: Given | None, b: Given | None) -> Given | None:
    if a is None or b is None:
        return None
    return (
        a
        if a == b
        else Given(
            a.conditions & b.conditions, call("or", a.some, b.some), call("or", a.all, b.all)
        )
    )


def _union(a: Span, b: Span) -> Span | None:
    if a.has_full and b.has_full:
        if a.lo == b.lo and a.full_lo == b.full_lo:
            return replace(
                a, hi=_either("max", a.hi, b.hi), full_hi=_either("max", a.full_hi, b.full_hi)
            )
        if a.hi == b.hi and a.full_hi == b.full_hi:
            return replace(
                a, lo=_either("min", a.lo, b.lo), full_lo=_either("min", a.full_lo, b.full_lo)
            )
        if _all_or_nothing(a) or _all_or_nothing(b):
            return _all_or(a, b) if _all_or_nothing(a) else _all_or(b, a)
    elif (a.lo, a.hi) == (b.lo, b.hi):
        return a if a.has_full else b
    return None


def _all_or_nothing(span: Span) -> bool:
    """True if the span consists of conditions on the outer tile only."""
    chosen = all(
        isinstance(b, Call) and b.fn == "where" and b.args[2] == _ZERO
        for b in (span.hi, span.full_hi)
    )
    return chosen and (span.lo, span.full_lo) == (_ZERO, _ZERO)


def _all_or(everything: Span, other: Span) -> Span:
    """Return all positions where the outer tile allows them, else the positions of the other
    span.
    """

    def choice(every: Node, first: Node, second: Node) -> Node:
        condition = children(every)[0]
        return first if first == second else call("where", condition, first, second)

    (hi, full_hi), size = (everything.hi, everything.full_hi), children(everything.hi)[1]
    return Span(
        choice(hi, _ZERO, other.lo),
        choice(hi, size, other.hi),
        choice(full_hi, _ZERO, other.full_lo),
        choice(full_hi, size, other.full_hi),
        has_full=True,
    )


# --- order ------------------------


def _unordered(groups: list[list[Part]]) -> Iterator[tuple[list[Part], list[Part]]]:
    """Yield pairs that no order of all groups separates."""
    for i, first in enumerate(groups):
        for second in groups[i + 1 :]:
            if _all_before(first, second) == _all_before(second, first):
                yield first, second
    # In a cycle such as [s, t), [t, u), [u, s), two spans have an order, three have none.
    for first, second, third in permutations(groups, 3):
        if _all_before(first, second) and _all_before(second, third) and _all_before(third, first):
            yield first, second


def _all_before(first: list[Part], second: list[Part]) -> bool:
    return all(_before(a.span, b.span) for a in first for b in second)


def _before(a: Span, b: Span) -> bool:
    """True if `a` can come before `b`: then only the part of `b` after the end of `a` is visited.

    This holds if only `a` starts at 0, or if `a` ends at or before the start of `b`.
    """
    if a.lo == _ZERO or b.lo == _ZERO:
        return b.lo != _ZERO
    return not _terms("min", a.hi).isdisjoint(_terms("max", b.lo))


def _terms(fn: str, node: Node) -> frozenset[Node]:
    """Return the operands of a `min` or `max`."""
    if isinstance(node, Call) and node.fn == fn:
        return frozenset().union(*(_terms(fn, a) for a in node.args))
    return frozenset({node})


def _exclusive(group: list[Part]) -> bool:
    """True if at most one of the spans has positions, except in tiles across a border."""
    return all(
        a.given is not None and b.given is not None and a.given.excludes(b.given)
        for i, a in enumerate(group)
        for b in group[i + 1 :]
    )


def _hull(group: list[Part], size: Node) -> Span:
    """Return one span around all.

    Its part without masking is that of the first span that holds for all rows.
    """
    if len(group) == 1:
        return group[0].span

    def where(given: Given | None, bound: Node, empty: Node) -> Node:
        return bound if given is None or bound == empty else call("where", given.some, bound, empty)

    lo = reduce(lambda a, b: _either("min", a, b), [where(p.given, p.span.lo, size) for p in group])
    hi = reduce(lambda a, b: _either("max", a, b), [p.span.hi for p in group])
    last, *others = reversed([p for p in group if p.span.has_full] or group[:1])
    full = last.span
    for part in others:
        bounds = ((part.span.full_lo, full.full_lo), (part.span.full_hi, full.full_hi))
        full_lo, full_hi = (
            a if part.given is None or a == b else call("where", part.given.all, a, b)
            for a, b in bounds
        )
        full = replace(part.span, full_lo=full_lo, full_hi=full_hi)
    return replace(full, lo=lo, hi=hi)


def _either(fn: str, a: Node, b: Node) -> Node:
    return a if a == b else call(fn, a, b)
