"""Functions of `itertools` on known sequences."""

from __future__ import annotations

import itertools
from typing import Any

from kgen.flex import effects, numbers
from kgen.flex.reader import Reader
from kgen.flex.source import Place
from kgen.flex.values import MISSING, Passing, Unknown


def called(ev: Reader, name: str, args: list[Any], keywords: dict[str, Any], place: Place) -> Any:
    """Return the result of a function of `itertools`, or `MISSING` if the function is not
    supported.
    """
    if any(isinstance(a, Unknown) for a in (*args, *keywords.values())):
        return next(a for a in (*args, *keywords.values()) if isinstance(a, Unknown))
    match name:
        case "accumulate" if args:
            return _accumulated(ev, args, keywords, place)
        case "chain" if not keywords:
            lists = [_listed(ev, value, place) for value in args]
            found = [item for items in lists for item in items]
        case "from_iterable" if len(args) == 1:
            return called(ev, "chain", _listed(ev, args[0], place), {}, place)
        case "pairwise" if len(args) == 1:
            found = list(itertools.pairwise(_listed(ev, args[0], place)))
        case "repeat" if len(args) == 2 and type(args[1]) is int:
            numbers.sized((), max(args[1], 0), place)
            found = [args[0]] * args[1]
        case "product" if not keywords:
            lists = [_listed(ev, value, place) for value in args]
            count = 1
            for items in lists:
                count *= len(items)
                numbers.sized((), count, place)
            found = list(itertools.product(*lists))
        case _:
            return MISSING
    return Passing(numbers.sized(found, 0, place), of=args)


def _accumulated(ev: Reader, args: list[Any], keywords: dict[str, Any], place: Place) -> Any:
    function = keywords.get("func", args[1] if len(args) > 1 else None)
    if function is not None and effects.runs_changes(ev, function):
        place.refuse(
            "not-in-language", "`accumulate` calls a function that changes values", "write a loop"
        )
    items = _listed(ev, args[0], place)
    if keywords.get("initial") is not None:
        items.insert(0, keywords["initial"])
    found = items[:1]
    for item in items[1:]:
        pair = (found[-1], item)
        found.append(
            ev.operate("add", pair, place)
            if function is None
            else ev.call(function, pair, {}, place)
        )
    return Passing(found, of=args[:1])


def _listed(ev: Reader, value: Any, place: Place) -> list[Any]:
    found: list[Any] = []
    for item in ev.items(value, place):
        ev.step(place)
        numbers.sized(found, 1, place).append(item)
    return found
