"""Class definitions of the source: constants, methods, enumerations and named tuples.

A class is read only if it has Python's default behavior. A metaclass, a decorator, or a special
method for attribute lookup makes the class unknown.
"""

from __future__ import annotations

import ast
from typing import Any

from kgen.flex import records, scopes, statements
from kgen.flex.instances import BASES, ENUMS
from kgen.flex.reader import Reader
from kgen.flex.source import Place
from kgen.flex.values import (
    Class,
    External,
    Frame,
    Function,
    Instance,
    Member,
    Scope,
    Unknown,
    Wrapped,
)

_SPECIAL = frozenset(
    {
        *(
            "__new__",
            "__getattribute__",
            "__getattr__",
            "__setattr__",
            "__delattr__",
            "__init_subclass__",
        ),
        *("__get__", "__set__", "__set_name__", "__class_getitem__", "__prepare__", "_missing_"),
        *("_generate_next_value_", "__slots__"),
    }
) - {"__slots__"}
AUTO = External("enum.auto()")


class Body(Frame):
    """The names of a class body. Methods do not see them."""

    outer_place: Place

    def closure(self) -> Scope:
        return self.outer.closure()


def defined(ev: Reader, node: ast.ClassDef, scope: Frame, place: Place) -> Any:
    """Return the class of a definition. Its body is read once."""
    bases = [ev.expression(base, scope, place.source) for base in node.bases]
    bases = [b for b in bases if b != External("builtins.object")]
    paths = [b.path for b in bases if isinstance(b, External)]
    own = [b for b in bases if isinstance(b, Class)]
    decorators = [ev.expression(d, scope, place.source) for d in node.decorator_list]
    of_data = records.options(decorators.pop()) if records.marked(decorators) else None
    body = Body(scope, bound=scopes.bound(node.body).bound, context=ev.context)
    body.shared = dict.fromkeys(
        scopes.bound(node.body).module | scopes.bound(node.body).outer, scope
    )
    for statement in node.body:
        statements.run(ev, [statement], body, place.source)
        if set(paths) & set(ENUMS):
            _automatic(body, any(path.endswith("Flag") for path in paths))
    strange = next((name for name in body.names if name in _SPECIAL), None)
    if (
        len(own) > 1
        or len(own) + len(paths) < len(bases)
        or set(paths) - BASES
        or decorators
        or node.keywords
        or strange
    ):
        return Unknown(place, f"the class `{node.name}`")
    inherited = own[0].bases if own else ()
    made = Class(node.name, place, {}, own[0] if own else None, (*paths, *inherited), ev.context)
    for name, value in body.names.items():
        made.names[name] = value.of(made) if isinstance(value, Function | Wrapped) else value
    if made.parent is not None:
        made.fields, made.data, made.frozen = (
            made.parent.fields,
            made.parent.data,
            made.parent.frozen,
        )
    if of_data is not None and not records.fill(made, node, of_data):
        return Unknown(place, f"the class `{node.name}`")
    if "typing.NamedTuple" in paths:
        made.fields = tuple(
            s.target.id
            for s in node.body
            if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
        )
    if set(made.bases) & set(ENUMS):
        _number(made)
    return made


def _automatic(body: Body, flags: bool) -> None:
    """Number the `auto()` members: consecutive numbers, or powers of two for flags."""
    before = [
        value
        for name, value in body.names.items()
        if type(value) is int and not name.startswith("_")
    ]
    for name, value in body.names.items():
        if value == AUTO and before and before[-1] != max(before):
            # Versions of Python choose different next numbers.
            body.names[name] = Unknown(body.outer_place, f"`{name}`")
        elif value == AUTO:
            last = before[-1] if before else 0
            body.names[name] = (1 << last.bit_length()) if flags else last + 1


def _number(cls: Class) -> None:
    """Turn the constants of an enumeration into members."""
    whole = any(ENUMS.get(path) for path in cls.bases)
    found: dict[Any, Any] = {}
    for name, value in list(cls.names.items()):
        if isinstance(value, Function | Wrapped) or name.startswith("_"):
            continue
        if type(value) is not int and (whole or not isinstance(value, str)):
            cls.names[name] = Unknown(cls.place, f"`{cls.name}.{name}`")
            continue
        if value not in found:
            own = {"value": value, "_value_": value}
            found[value] = (
                Member(int(value), cls, name)
                if whole
                else Instance(cls, {**own, "name": name}, cls.context)
            )
        cls.names[name] = found[value]
    cls.members = found
