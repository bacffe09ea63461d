"""Python's builtin functions, and methods of lists and dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kgen.flex import effects, numbers, tables, tensors
from kgen.flex.reader import Reader
from kgen.flex.source import Place
from kgen.flex.values import (
    MISSING,
    Class,
    External,
    Part,
    Passing,
    Shape,
    Tensor,
    Term,
    Unknown,
    is_callable,
    is_number,
    kind,
    measured,
)

Keywords = dict[str, Any]


def of_sequence(
    ev: Reader, owner: Any, name: str, args: list[Any], keywords: Keywords, place: Place
) -> Any:
    if name in tables.CHANGING:
        ev.changing(owner, place)
    if name in ("get", "pop", "setdefault", "insert") and args and not _plain(args[0]):
        if isinstance(args[0], Unknown):
            ev.untold(args[0])
        place.refuse(
            "data-dependent", f"the result of `.{name}()` depends on the pair", "use a tensor"
        )
    match owner, name:
        case list(), "extend" if len(args) == 1:
            args = [numbers.sized(list(ev.items(args[0], place)), len(owner), place)]
        case list() | dict(), _ if name in tables.OF_SEQUENCES and (name != "update" or not args):
            numbers.sized(owner, 1 + len(keywords), place)
        case dict(), "update" if isinstance(args[0], dict):
            numbers.sized(owner, len(args[0]) + len(keywords), place)
        case str(), _ if not ev.of_a_pair:
            return Unknown(place, f"the result of `.{name}()`")
        case _:
            place.refuse("not-in-language", f"`.{name}()` cannot be read", "write the result")
    value = numbers.computed(lambda: getattr(owner, name)(*args, **keywords), place)
    return (
        Passing(list(value), once=False, of=[owner])
        if name in ("items", "keys", "values")
        else value
    )


def of_number(owner: Any, name: str, args: list[Any], place: Place) -> Any:
    """Return the result of a method of a number."""
    if name in ("is_integer", "bit_length", "bit_count", "conjugate") and not args:
        return numbers.computed(lambda: getattr(owner, name)(), place)
    return Unknown(place, f"the result of `.{name}()`")


def _plain(value: Any) -> bool:
    return value is None or is_number(value) or isinstance(value, str | tuple | External)


_OF_NUMBERS = frozenset({"abs", "bool", "float", "int", "max", "min", "pow", "round"})
"""Functions that accept a value of the pair or a number."""


def called(ev: Reader, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    """Return the result of a builtin function."""
    if ev.of_a_pair:
        in_pair = measured if name in _OF_NUMBERS else lambda value: value
        args = [tensors.scalar(in_pair(a), place) for a in args]
    left = set(keywords) - _KEYWORDS.get(name, set())
    if left and name not in ("print", "dict"):
        place.refuse(
            "not-in-language",
            f"`{name}` is called with the argument `{min(left)}`",
            "leave the argument out",
        )
    if name in _FUNCTIONS:
        found = _FUNCTIONS[name](ev, name, args, keywords, place)
        if found is not MISSING:
            return found
    if name in _PURE and args and all(is_number(a) for a in args):
        return numbers.computed(lambda: _PURE[name](*args), place)
    return _unread(ev, name, args, keywords, place)


def _unread(ev: Reader, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    """Return an unknown result. Inside a mod, refuse the call."""
    unknown = next((a for a in args if isinstance(a, Unknown)), None)
    if ev.of_a_pair:
        if unknown is not None:
            ev.untold(unknown)
        place.refuse(
            "not-in-language", f"`{name}(...)` cannot be read here", "use torch's functions"
        )
    # Builtins call their function arguments. Functions such as `list.append` change their first
    # argument.
    given = (*args, *keywords.values())
    effects.escaped(ev, given if "." in name else filter(is_callable, given), place)
    return unknown or Unknown(place, f"the result of `{name}`")


# --- one function each: its value, or `MISSING` for arguments that it does not know ---------------


def _print(ev: Reader, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    return None


def _number(ev: Reader, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    match args:
        case [Term() | Part() as value]:
            dtype = {"int": "int32", "float": "fp32", "bool": "bool"}[name]
            return Term(
                "cast", (tensors.element(value) if isinstance(value, Part) else value, dtype), place
            )
        case [str() as text] if name == "float":
            return numbers.computed(lambda: float(text), place)
    return MISSING


def _of_one(ev: Reader, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    """Return `abs` or `round` of a value of the pair."""
    match args:
        case [Term() | Part() as value]:
            return ev.operate(name, (value,), place)
    return MISSING


def _extreme(ev: Reader, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    """Return `min` or `max` of the arguments."""
    match args:
        case [_, _, *_] if not keywords and any(isinstance(a, Term | Part) for a in args):
            result = args[0]
            for other in args[1:]:
                result = ev.operate(name, (result, other), place)
            return result
        case [list() | tuple() | range() | dict() | Passing() as items]:
            listed = _listed(ev, items, place)
            if not listed and "default" in keywords:
                return keywords["default"]
            if not listed:
                place.refuse("bad-number", f"`{name}` gets no values", "pass a number")
            if "key" in keywords:
                return _first_by(ev, name, listed, keywords["key"], place)
            return listed[0] if len(listed) == 1 else called(ev, name, listed, {}, place)
        case [_, _, *_] if "key" in keywords:
            return _first_by(ev, name, args, keywords["key"], place)
    return MISSING


def _power(ev: Reader, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    return ev.operate("pow", (args[0], args[1]), place) if len(args) == 2 else MISSING


def _callable(ev: Reader, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    return is_callable(args[0]) if args else MISSING


def _isinstance(ev: Reader, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    return _instance(args, place) if args else MISSING


def _len(ev: Reader, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    match args:
        case [list() | tuple() | dict() | range() as value]:
            return len(value)
        case [Class() as value] if value.find_items(place) is not None:
            return len(_listed(ev, value, place))
        case [Tensor() | Part() as value]:
            shape = tensors.attribute(value, "shape", place)
            if isinstance(shape, Shape):
                return shape.find_item(0, place)
            known = isinstance(shape, tuple) and shape
            return shape[0] if known else Unknown(place, "the length of a tensor")
    return MISSING


def _range(ev: Reader, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    if 1 <= len(args) <= 3 and all(is_number(a) for a in args):
        return numbers.computed(lambda: range(*args), place)
    if any(isinstance(a, Term | Part) for a in args):
        hint = "write the steps one by one: the source must define the number of steps"
        place.refuse("data-dependent", "the number of loop iterations depends on the pair", hint)
    return MISSING


def _enumerate(ev: Reader, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    match args:
        case [value, *start] if all(type(n) is int for n in (*start, *keywords.values())):
            first = keywords.get("start", start[0] if start else 0)
            return Passing(list(enumerate(_listed(ev, value, place), first)), of=[value])
    return MISSING


def _zip(ev: Reader, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    lists = [_listed(ev, value, place) for value in args]
    strict = keywords.get("strict", False) is not False
    return Passing(numbers.computed(lambda: list(zip(*lists, strict=strict)), place), of=args)


def _reversed(ev: Reader, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    return Passing(_listed(ev, args[0], place)[::-1], of=args) if len(args) == 1 else MISSING


def _sorted(ev: Reader, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    return _ordered(ev, _listed(ev, args[0], place), keywords, place) if len(args) == 1 else MISSING


def _sequence(ev: Reader, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    """Return `tuple(...)` or `list(...)`."""
    if len(args) > 1:
        return MISSING
    return (tuple if name == "tuple" else list)(_listed(ev, args[0], place) if args else ())


def _map(ev: Reader, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    match args:
        case [function, value]:
            if effects.runs_changes(ev, function):
                place.refuse(
                    "not-in-language", "`map` calls a function that changes values", "write a loop"
                )
            found = [ev.call(function, [item], {}, place) for item in _listed(ev, value, place)]
            return Passing(found, of=[value])
    return MISSING


def _all_or_any(ev: Reader, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    if len(args) != 1:
        return MISSING
    found = [ev.decided(item, place.node, place.source) for item in _listed(ev, args[0], place)]  # type: ignore[arg-type]
    return all(found) if name == "all" else any(found)


def _sum(ev: Reader, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    match args:
        case [value, *start]:
            result = keywords.get("start", start[0] if start else 0)
            for item in _listed(ev, value, place):
                result = ev.operate("add", (result, item), place)
            return result
    return MISSING


def _dict(ev: Reader, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    return MISSING if args else dict(keywords)


_FUNCTIONS: Mapping[str, Callable[[Reader, str, list[Any], Keywords, Place], Any]] = {
    "print": _print,
    **dict.fromkeys(("int", "float", "bool"), _number),
    **dict.fromkeys(("abs", "round"), _of_one),
    **dict.fromkeys(("min", "max"), _extreme),
    "pow": _power,
    "callable": _callable,
    "isinstance": _isinstance,
    "len": _len,
    "range": _range,
    "enumerate": _enumerate,
    "zip": _zip,
    "reversed": _reversed,
    "sorted": _sorted,
    **dict.fromkeys(("tuple", "list"), _sequence),
    "map": _map,
    **dict.fromkeys(("all", "any"), _all_or_any),
    "sum": _sum,
    "dict": _dict,
}
_PURE: Mapping[str, Callable[..., Any]] = {
    "abs": abs,
    "int": int,
    "float": float,
    "bool": bool,
    "round": round,
    "min": min,
    "max": max,
    "divmod": divmod,
}
"""Functions that are called directly on numbers."""
_KEYWORDS = {
    "enumerate": {"start"},
    "zip": {"strict"},
    "sorted": {"key", "reverse"},
    "sum": {"start"},
    "min": {"key", "default"},
    "max": {"key", "default"},
}


def _keys(ev: Reader, items: list[Any], key: Any, place: Place) -> list[Any]:
    """Return the sort keys of a sequence. Only numbers are supported."""
    keys = items if key is None else [ev.call(key, [item], {}, place) for item in items]
    for value in keys:
        if isinstance(value, Unknown):
            ev.untold(value)
        if not is_number(value):
            place.refuse("not-in-language", f"{kind(value)} cannot be sorted", "sort numbers")
    return keys


def _first_by(ev: Reader, name: str, items: list[Any], key: Any, place: Place) -> Any:
    keys = _keys(ev, items, key, place)
    return items[keys.index((min if name == "min" else max)(keys))]


def _ordered(ev: Reader, items: list[Any], keywords: Keywords, place: Place) -> list[Any]:
    keys = _keys(ev, items, keywords.get("key"), place)
    reverse = keywords.get("reverse", False) is not False
    return [items[i] for i in sorted(range(len(items)), key=keys.__getitem__, reverse=reverse)]


def _listed(ev: Reader, value: Any, place: Place) -> list[Any]:
    found: list[Any] = []
    for item in ev.items(value, place):
        ev.step(place)
        numbers.sized(found, 1, place).append(item)
    return found


def _instance(args: list[Any], place: Place) -> Any:
    value, asked = (*args, None)[:2]
    paths = [
        a.path for a in (asked if isinstance(asked, tuple) else (asked,)) if isinstance(a, External)
    ]
    names = {
        "builtins.int": int,
        "builtins.float": float,
        "builtins.bool": bool,
        "builtins.tuple": tuple,
    }
    names |= {"builtins.list": list, "builtins.str": str, "builtins.dict": dict}
    if isinstance(value, Unknown) or not paths:
        return Unknown(place, "a type")
    if isinstance(value, Tensor) and value.open and value.shape is None:
        return Unknown(place, "the type of this element")
    if isinstance(value, Tensor | Part | Term):
        return any(path == "torch.Tensor" for path in paths)
    return any(path in names and isinstance(value, names[path]) for path in paths)
