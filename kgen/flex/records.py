"""Dataclasses of the source, and named tuples created by a call: fields and instances."""

from __future__ import annotations

import ast
import keyword
from collections.abc import Mapping, Sequence
from typing import Any

from kgen.flex.reader import Reader
from kgen.flex.source import Place
from kgen.flex.values import MISSING, Class, External, Fresh, Partial, Unknown

DATACLASS = External("dataclasses.dataclass")
_READ = frozenset(
    {"frozen", "eq", "order", "repr", "unsafe_hash", "slots", "match_args", "weakref_slot"}
)
"""Options that do not change how instances are created."""


def marked(decorators: Sequence[Any]) -> bool:
    """True if the only decorator is `dataclass`, with or without options."""
    if len(decorators) != 1:
        return False
    (one,) = decorators
    return one == DATACLASS or (isinstance(one, Partial) and one.function == DATACLASS)


def options(decorator: Any) -> Mapping[str, Any]:
    """Return the options of the decorator."""
    return decorator.keywords if isinstance(decorator, Partial) else {}


def fill(cls: Class, node: ast.ClassDef, given: Mapping[str, Any]) -> bool:
    """Record the fields of a dataclass.

    Return false if its options or annotations are not supported.
    """
    if set(given) - _READ or not all(isinstance(value, bool) for value in given.values()):
        return False
    fields = dict(cls.data or {})
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        said = ast.unparse(statement.annotation)
        if "InitVar" in said or "KW_ONLY" in said:
            return False
        if "ClassVar" not in said:
            name = statement.target.id
            fields[name] = cls.names.get(name, MISSING)
    for name, value in fields.items():
        if isinstance(value, Fresh):
            cls.names.pop(name, None)
    cls.data = fields
    cls.frozen = given.get("frozen") is True
    if given.get("eq") is not False:
        cls.names.setdefault("__eq__", Unknown(cls.place, f"the equality of two `{cls.name}`"))
    return True


def field(keywords: Mapping[str, Any], place: Place) -> Any:
    """Return the value of `dataclasses.field(...)`."""
    left = {
        name: value
        for name, value in keywords.items()
        if name not in ("repr", "compare", "hash", "metadata")
    }
    match left:
        case {"default": value, **rest} if not rest:
            return value
        case {"default_factory": factory, **rest} if not rest:
            return Fresh(factory)
        case {**rest} if not rest:
            return MISSING
    return Unknown(place, "the result of `field`")


def filled(
    ev: Reader, cls: Class, args: Sequence[Any], keywords: Mapping[str, Any], place: Place
) -> dict[str, Any]:
    """Return the attributes of an instance created with these arguments."""
    fields = cls.data or {}
    given = dict(zip(fields, args, strict=False)) | dict(keywords)
    missing = [name for name, default in fields.items() if default is MISSING and name not in given]
    if len(given) != len(args) + len(keywords) or set(given) - set(fields) or missing:
        place.refuse("bad-call", f"wrong arguments for `{cls.name}`", f"pass {', '.join(fields)}")
    made: dict[str, Any] = {}
    for name, default in fields.items():
        value = given.get(name, default)
        if value is default and isinstance(default, Fresh):
            value = ev.call(default.factory, [], {}, place)
            value = ev.own(value) if type(value) in (list, dict) else value
        made[name] = value
    return made


def named_tuple(ev: Reader, args: Sequence[Any], keywords: Mapping[str, Any], place: Place) -> Any:
    """Return the class of `namedtuple("P", "a b")` or
    `NamedTuple("P", [("a", int), ("b", int)])`.
    """
    match args:
        case [str() as name, str() as text]:
            fields = text.replace(",", " ").split()
        case [str() as name, list() | tuple() as listed]:
            fields = [item[0] if isinstance(item, tuple) and item else item for item in listed]
        case _:
            return Unknown(place, "this named tuple")
    defaults = keywords.get("defaults") or ()
    named = all(
        isinstance(f, str) and f.isidentifier() and not keyword.iskeyword(f) for f in fields
    )
    if set(keywords) - {"defaults"} or not named or not isinstance(defaults, list | tuple):
        return Unknown(place, "this named tuple")
    if (
        len(set(fields)) < len(fields)
        or len(defaults) > len(fields)
        or any(f[0] == "_" for f in fields)
    ):
        return Unknown(place, "this named tuple")
    values = dict(zip(fields[len(fields) - len(defaults) :], defaults, strict=True))
    return Class(name, place, values, None, ("typing.NamedTuple",), ev.context, tuple(fields))
