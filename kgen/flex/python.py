"""Python's own functions, and the methods of its lists and dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kgen.flex import effects, numbers, tables, tensors
from kgen.flex.source import Place
from kgen.flex.values import (
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

if TYPE_CHECKING:
    from kgen.flex.evaluating import Evaluator

Keywords = dict[str, Any]


def of_sequence(
    ev: Evaluator, owner: Any, name: str, args: list[Any], keywords: Keywords, place: Place
) -> Any:
    if name in tables.CHANGING:
        ev.changing(owner, place)
    if name in ("get", "pop", "setdefault", "insert") and args and not _plain(args[0]):
        if isinstance(args[0], Unknown):
            ev.untold(args[0])
        place.refuse("data-dependent", f"the pair decides what `.{name}()` gives", "use a tensor")
    match owner, name:
        case list(), "extend" if len(args) == 1:
            args = [numbers.sized(list(ev.items(args[0], place)), len(owner), place)]
        case list() | dict(), _ if name in tables.OF_SEQUENCES and (name != "update" or not args):
            numbers.sized(owner, 1 + len(keywords), place)
        case dict(), "update" if isinstance(args[0], dict):
            numbers.sized(owner, len(args[0]) + len(keywords), place)
        case str(), _ if not ev.of_a_pair:
            return Unknown(place, f"what `.{name}()` gives")
        case _:
            place.refuse("not-in-language", f"`.{name}()` cannot be read", "write what it gives")
    value = numbers.computed(lambda: getattr(owner, name)(*args, **keywords), place)
    return Passing(list(value), once=False, of=[owner]) if name in ("items", "keys", "values") else value


def of_number(owner: Any, name: str, args: list[Any], place: Place) -> Any:
    """A method of a number."""
    if name in ("is_integer", "bit_length", "bit_count", "conjugate") and not args:
        return numbers.computed(lambda: getattr(owner, name)(), place)
    return Unknown(place, f"what `.{name}()` gives")


def _plain(value: Any) -> bool:
    return value is None or is_number(value) or isinstance(value, str | tuple | External)


_OF_NUMBERS = frozenset({"abs", "bool", "float", "int", "max", "min", "pow", "round"})
"""Functions that take a value of the pair as well as a number."""


def called(ev: Evaluator, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    if ev.of_a_pair:
        in_pair = measured if name in _OF_NUMBERS else lambda value: value
        args = [tensors.scalar(in_pair(a), place) for a in args]
    simple = all(is_number(a) for a in args)
    of_pair = any(isinstance(a, Term | Part) for a in args)
    left = set(keywords) - _KEYWORDS.get(name, set())
    if left and name not in ("print", "dict"):
        place.refuse("not-in-language", f"`{name}` is called with `{min(left)}`", "write it without")
    match name, args:
        case "print", _:
            return None
        case (("int" | "float" | "bool"), [Term() | Part() as value]):
            dtype = {"int": "int32", "float": "fp32", "bool": "bool"}[name]
            return Term("cast", (tensors.element(value) if isinstance(value, Part) else value, dtype), place)
        case "float", [str() as text]:
            return numbers.computed(lambda: float(text), place)
        case "abs", [Term() | Part() as value]:
            return ev.operate("abs", (value,), place)
        case "round", [Term() | Part() as value]:
            return ev.operate("round", (value,), place)
        case (("min" | "max"), [_, _, *_]) if of_pair and not keywords:
            result = args[0]
            for other in args[1:]:
                result = ev.operate(name, (result, other), place)
            return result
        case "pow", [_, _]:
            return ev.operate("pow", (args[0], args[1]), place)
        case (("callable" | "isinstance"), [value, *_]):
            return is_callable(value) if name == "callable" else _instance(args, place)
        case "len", [list() | tuple() | dict() | range() as value]:
            return len(value)
        case "len", [Class() as value] if value.find_items(place) is not None:
            return len(_listed(ev, value, place))
        case "len", [Tensor() | Part() as value]:
            shape = tensors.attribute(value, "shape", place)
            if isinstance(shape, Shape):
                return shape.find_item(0, place)
            return (
                shape[0] if isinstance(shape, tuple) and shape else Unknown(place, "the length of a tensor")
            )
        case "range", _ if simple and 1 <= len(args) <= 3:
            return numbers.computed(lambda: range(*args), place)
        case "range", _ if of_pair:
            hint = "write its steps one by one; the number of steps must be known from the source"
            place.refuse("data-dependent", "how often a loop runs depends on the pair", hint)
        case "enumerate", [value, *start] if all(type(n) is int for n in (*start, *keywords.values())):
            first = keywords.get("start", start[0] if start else 0)
            return Passing(list(enumerate(_listed(ev, value, place), first)), of=[value])
        case "zip", _:
            lists = [_listed(ev, value, place) for value in args]
            strict = keywords.get("strict", False) is not False
            return Passing(numbers.computed(lambda: list(zip(*lists, strict=strict)), place), of=args)
        case "reversed", [value]:
            return Passing(_listed(ev, value, place)[::-1], of=[value])
        case "sorted", [value]:
            return _ordered(ev, _listed(ev, value, place), keywords, place)
        case (("tuple" | "list"), []):
            return () if name == "tuple" else []
        case (("tuple" | "list"), [value]):
            return (tuple if name == "tuple" else list)(_listed(ev, value, place))
        case "map", [function, value]:
            if effects.runs_changes(ev, function):
                place.refuse("not-in-language", "`map` calls what changes values", "write a loop")
            return Passing(
                [ev.call(function, [item], {}, place) for item in _listed(ev, value, place)], of=[value]
            )
        case (("all" | "any"), [value]):
            found = [ev.decided(item, place.node, place.source) for item in _listed(ev, value, place)]  # type: ignore[arg-type]
            return all(found) if name == "all" else any(found)
        case "sum", [value, *start]:
            result = keywords.get("start", start[0] if start else 0)
            for item in _listed(ev, value, place):
                result = ev.operate("add", (result, item), place)
            return result
        case (("min" | "max"), [list() | tuple() | range() | dict() | Passing() as items]):
            listed = _listed(ev, items, place)
            if not listed and "default" in keywords:
                return keywords["default"]
            if not listed:
                place.refuse("bad-number", f"`{name}` is given nothing", "give it a number")
            if "key" in keywords:
                return _first_by(ev, name, listed, keywords["key"], place)
            return listed[0] if len(listed) == 1 else called(ev, name, listed, {}, place)
        case (("min" | "max"), [_, _, *_]) if "key" in keywords:
            return _first_by(ev, name, args, keywords["key"], place)
    pure: Mapping[str, Callable[..., Any]] = {
        "abs": abs,
        "int": int,
        "float": float,
        "bool": bool,
        "round": round,
        "min": min,
        "max": max,
        "divmod": divmod,
    }
    if name in pure and simple and args:
        return numbers.computed(lambda: pure[name](*args), place)
    if name == "dict" and not args:
        return dict(keywords)
    unknown = next((a for a in args if isinstance(a, Unknown)), None)
    if ev.of_a_pair:
        if unknown is not None:
            ev.untold(unknown)
        place.refuse("not-in-language", f"`{name}(...)` cannot be read here", "use torch's functions")
    # Python's functions call those that they are given; `list.append` and the like change their first argument.
    given = (*args, *keywords.values())
    effects.escaped(ev, given if "." in name else filter(is_callable, given), place)
    return unknown or Unknown(place, f"what `{name}` gives")


_KEYWORDS = {
    "enumerate": {"start"},
    "zip": {"strict"},
    "sorted": {"key", "reverse"},
    "sum": {"start"},
    "min": {"key", "default"},
    "max": {"key", "default"},
}


def _keys(ev: Evaluator, items: list[Any], key: Any, place: Place) -> list[Any]:
    """The key that a sequence is ordered by; only numbers are read."""
    keys = items if key is None else [ev.call(key, [item], {}, place) for item in items]
    for value in keys:
        if isinstance(value, Unknown):
            ev.untold(value)
        if not is_number(value):
            place.refuse("not-in-language", f"{kind(value)} is ordered", "order numbers")
    return keys


def _first_by(ev: Evaluator, name: str, items: list[Any], key: Any, place: Place) -> Any:
    keys = _keys(ev, items, key, place)
    return items[keys.index((min if name == "min" else max)(keys))]


def _ordered(ev: Evaluator, items: list[Any], keywords: Keywords, place: Place) -> list[Any]:
    keys = _keys(ev, items, keywords.get("key"), place)
    reverse = keywords.get("reverse", False) is not False
    return [items[i] for i in sorted(range(len(items)), key=keys.__getitem__, reverse=reverse)]


def _listed(ev: Evaluator, value: Any, place: Place) -> list[Any]:
    found: list[Any] = []
    for item in ev.items(value, place):
        ev.step(place)
        numbers.sized(found, 1, place).append(item)
    return found


def _instance(args: list[Any], place: Place) -> Any:
    value, asked = (*args, None)[:2]
    paths = [a.path for a in (asked if isinstance(asked, tuple) else (asked,)) if isinstance(a, External)]
    names = {"builtins.int": int, "builtins.float": float, "builtins.bool": bool, "builtins.tuple": tuple}
    names |= {"builtins.list": list, "builtins.str": str, "builtins.dict": dict}
    if isinstance(value, Unknown) or not paths:
        return Unknown(place, "a type")
    if isinstance(value, Tensor) and value.open and value.shape is None:
        return Unknown(place, "the type of what is loaded")
    if isinstance(value, Tensor | Part | Term):
        return any(path == "torch.Tensor" for path in paths)
    return any(path in names and isinstance(value, names[path]) for path in paths)
