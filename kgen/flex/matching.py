"""Patterns of `match` on known values."""

from __future__ import annotations

import ast
from typing import Any

from kgen.flex import changes
from kgen.flex.reader import Reader
from kgen.flex.source import Place, Source
from kgen.flex.values import Class, External, Frame, Instance, Named, Unknown, is_number, kind

_TYPES = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "list": list,
    "tuple": tuple,
    "dict": dict,
}


def holds(ev: Reader, value: Any, case: ast.match_case, frame: Frame, source: Source) -> bool:
    """True if the case matches. Bind the names of its pattern."""
    if not _matches(ev, case.pattern, value, frame, source):
        return False
    return case.guard is None or ev.decided(
        ev.expression(case.guard, frame, source), case.guard, source
    )


def _matches(ev: Reader, pattern: ast.pattern, value: Any, frame: Frame, source: Source) -> bool:
    place = Place(source, pattern)
    match pattern:
        case ast.MatchAs(pattern=inner, name=name):
            if inner is not None and not _matches(ev, inner, value, frame, source):
                return False
            if name is not None:
                changes.put(ev, frame, name, value, place)
            return True
        case ast.MatchOr(patterns=patterns):
            return any(_matches(ev, inner, value, frame, source) for inner in patterns)
    _known(ev, value, place)
    match pattern:
        case ast.MatchSingleton(value=single):
            return value is single
        case ast.MatchValue(value=node):
            wanted = ev.expression(node, frame, source)
            return ev.decided(ev.operate("eq", (value, wanted), place), node, source)
        case ast.MatchSequence(patterns=patterns):
            return isinstance(value, list | tuple) and _sequence(ev, patterns, value, frame, source)
        case ast.MatchMapping(keys=keys, patterns=patterns, rest=None) if isinstance(value, dict):
            found = [ev.expression(key, frame, source) for key in keys]
            return all(
                key in value and _matches(ev, inner, value[key], frame, source)
                for key, inner in zip(found, patterns, strict=True)
            )
        case ast.MatchMapping(rest=None):
            return False
        case ast.MatchClass(cls=cls, patterns=patterns) if isinstance(value, Instance | Named):
            return _fields(ev, pattern, ev.expression(cls, frame, source), value, frame, source)
        case ast.MatchClass(cls=ast.Name() as cls, patterns=patterns, kwd_attrs=[]) if (
            len(patterns) < 2
        ):
            type_ = ev.expression(cls, frame, source)
            name = type_.path.removeprefix("builtins.") if isinstance(type_, External) else ""
            if name in _TYPES:
                right = isinstance(value, _TYPES[name])
                return right and all(_matches(ev, p, value, frame, source) for p in patterns)
    place.refuse(
        "not-in-language", "this pattern cannot be read", "compare with `==`, in `if` and `elif`"
    )


def _fields(
    ev: Reader,
    pattern: ast.MatchClass,
    cls: Any,
    value: Instance | Named,
    frame: Frame,
    source: Source,
) -> bool:
    """True if a value is an instance of a class pattern and its attributes match."""
    place = Place(source, pattern)
    if not isinstance(cls, Class):
        place.refuse("not-in-language", "this pattern cannot be read", "name a class of the source")
    own: Class | None = value.cls
    while own is not None and own is not cls:
        own = own.parent
    names = list(cls.data or cls.fields or ())
    if own is None:
        return False
    if len(pattern.patterns) > len(names):
        place.refuse(
            "bad-call", f"`{cls.name}` has {len(names)} fields", "match that number of fields"
        )
    pairs = [*zip(names, pattern.patterns, strict=False)]
    pairs += zip(pattern.kwd_attrs, pattern.kwd_patterns, strict=True)
    found = [(ev.attribute(value, name, place), inner) for name, inner in pairs]
    return all(_matches(ev, inner, item, frame, source) for item, inner in found)


def _known(ev: Reader, value: Any, place: Place) -> None:
    if isinstance(value, Unknown):
        ev.untold(value)
    if isinstance(value, Instance) and (
        value.cls.members is not None or value.cls.data is not None
    ):
        return
    if not (
        is_number(value) or isinstance(value, str | list | tuple | dict | External) or value is None
    ):
        place.refuse(
            "data-dependent", f"`match` depends on {kind(value)}", "write `torch.where(...)`"
        )


def _sequence(
    ev: Reader,
    patterns: list[ast.pattern],
    value: list[Any] | tuple[Any, ...],
    frame: Frame,
    source: Source,
) -> bool:
    items: list[Any] = list(value)
    starred = next((i for i, p in enumerate(patterns) if isinstance(p, ast.MatchStar)), None)
    if starred is not None and len(items) >= len(patterns) - 1:
        last = starred + len(items) - len(patterns) + 1
        items[starred:last] = [ev.own(items[starred:last])]
    if len(items) != len(patterns):
        return False
    for inner, item in zip(patterns, items, strict=True):
        if isinstance(inner, ast.MatchStar):
            if inner.name is not None:
                changes.put(ev, frame, inner.name, item, Place(source, inner))
        elif not _matches(ev, inner, item, frame, source):
            return False
    return True
