"""Comparisons, with Python's semantics."""

from __future__ import annotations

import ast
from typing import Any

from kgen.flex.operators import COMPARISONS
from kgen.flex.reader import Reader
from kgen.flex.source import Place, Source
from kgen.flex.values import DtypeOf, External, Part, Scope, Tensor, Term, Unknown, is_number


def chain(ev: Reader, node: ast.Compare, scope: Scope, source: Source) -> Any:
    """Return the value of a comparison or a chain. A chain stops at the first false comparison."""
    place = Place(source, node)
    left = ev.expression(node.left, scope, source)
    links: list[Any] = []
    for operator, part in zip(node.ops, node.comparators, strict=True):
        if links and isinstance(links[-1], Unknown):
            # Python evaluates the rest only if this comparison is true.
            ev.untold(links[-1])
        if links and not isinstance(links[-1], Term) and not links[-1]:
            break
        right = ev.expression(part, scope, source)
        links.append(compared(ev, operator, left, right, place))
        left = right
    if len(links) > 1 and any(isinstance(link, Term) for link in links):
        hint = "write two comparisons joined with `&`"
        place.refuse("data-dependent", "a chain of comparisons depends on the pair", hint)
    return next((link for link in links[:-1] if not link), links[-1])


def compared(ev: Reader, operator: ast.cmpop, left: Any, right: Any, place: Place) -> Any:
    """Return the value of one comparison."""
    match operator:
        case ast.Is() | ast.IsNot():
            if isinstance(left, Unknown | DtypeOf):
                return known(left, place)
            if isinstance(right, Unknown | DtypeOf):
                return known(right, place)
            if _identity_varies(left) and _identity_varies(right):
                return Unknown(place, "the identity of two equal values", "compare with `==`")
            same = left is right
            if is_number(left) or isinstance(left, External):
                same = type(left) is type(right) and left == right
            return same == isinstance(operator, ast.Is)
        case ast.In() | ast.NotIn():
            if isinstance(left, Term | Tensor | Part) or not isinstance(
                right, tuple | list | dict | range
            ):
                if isinstance(right, Unknown):
                    return known(right, place)
                hint = "compare with `==`, and join the cases with `|`"
                place.refuse("data-dependent", "`in` depends on the pair", hint)
            if isinstance(left, Unknown | DtypeOf):
                return known(left, place)
            untold = [item for item in right if isinstance(item, Unknown | Term | Tensor)]
            among = any(left is item or (_plain(item) and left == item) for item in right)
            if untold and not among:
                return (
                    known(untold[0], place)
                    if isinstance(untold[0], Unknown)
                    else Unknown(place, "`in`")
                )
            return among == isinstance(operator, ast.In)
    return ev.operate(COMPARISONS[type(operator)], (left, right), place)


def _plain(value: Any) -> bool:
    return not isinstance(value, Unknown | Term | Tensor | Part)


def _identity_varies(value: Any) -> bool:
    """True if equal values may be one object or two in Python."""
    if type(value) is int:
        return not -5 <= value <= 256
    return isinstance(value, float | str | tuple) and not isinstance(value, bool)


def known(value: Any, place: Place) -> Unknown:
    """Return an unknown comparison. The kernel chooses the dtype of a value of the pair."""
    return (
        value.lost()
        if isinstance(value, Unknown)
        else Unknown(place, "the dtype of a value", "leave it out")
    )
