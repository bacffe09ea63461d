"""Comprehensions and generator expressions."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from kgen.flex import changes, effects, numbers, scopes
from kgen.flex.reader import Reader
from kgen.flex.source import Place, Source
from kgen.flex.values import Passing, Scope


def listed(
    ev: Reader, node: ast.ListComp | ast.GeneratorExp | ast.DictComp, scope: Scope, source: Source
) -> Any:
    """Return the value of a comprehension."""
    place = Place(source, node)
    found: list[Any] = []
    pairs: dict[Any, Any] = {}
    frame = scopes.Comprehension(scope)
    frame.context = ev.context

    def each(generators: Sequence[ast.comprehension], over: Any) -> None:
        first, *rest = generators
        for item in ev.items(over, Place(source, first.iter)):
            ev.step(place)
            changes.assign(ev, first.target, item, frame, source)
            if not all(ev.decided(ev.expression(c, frame, source), c, source) for c in first.ifs):
                continue
            if rest:
                each(rest, ev.expression(rest[0].iter, frame, source))
            elif isinstance(node, ast.DictComp):
                key = ev.expression(node.key, frame, source)
                changes.set_item(
                    ev, ev.own(pairs), key, ev.expression(node.value, frame, source), place
                )
            else:
                numbers.sized(found, 1, place).append(ev.expression(node.elt, frame, source))

    if isinstance(node, ast.GeneratorExp) and effects.changes(ev, node, scope):
        place.refuse("not-in-language", "a generator changes values", "write a list: `[...]`")
    # Python evaluates the first sequence in the enclosing scope.
    each(node.generators, ev.expression(node.generators[0].iter, scope, source))
    if isinstance(node, ast.DictComp):
        return pairs
    return Passing(found) if isinstance(node, ast.GeneratorExp) else found
