"""Uses of classes and instances: attributes, calls and assignments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kgen.flex import records, scopes, tensors
from kgen.flex.reader import Reader
from kgen.flex.source import Place
from kgen.flex.values import (
    MISSING,
    Class,
    External,
    Function,
    Instance,
    Member,
    Method,
    Named,
    Partial,
    Scope,
    Super,
    Tensor,
    Unknown,
    Wrapped,
    plain,
)

ENUMS = {"enum.Enum": False, "enum.Flag": False, "enum.IntEnum": True, "enum.IntFlag": True}
"""Bases of enumerations. The value is true if members are integers."""
MODULE = "torch.nn.Module"
BASES = {
    *ENUMS,
    MODULE,
    "builtins.object",
    "typing.NamedTuple",
    "abc.ABC",
    "typing.Generic",
    "typing.Protocol",
}
"""Classes of other packages that may be bases of classes that are read."""


# --- attributes ------------------------


def attribute(ev: Reader, owner: Any, name: str, place: Place) -> Any:
    """Return `owner.name` of a class, an instance, a member of an enumeration, or `super()`."""
    match owner:
        case Class():
            return _bound(ev, owner.find(name), None, owner, name, place)
        case Super(cls=cls, self=self):
            value = cls.parent.find(name) if cls.parent else MISSING
            if value is MISSING and name == "__init__" and set(cls.bases) <= BASES:
                return External("builtins.print")
            return _bound(ev, value, self, cls, name, place)
        case Member():
            known = {"value": int(owner), "name": owner.label}
            return (
                known[name]
                if name in known
                else _bound(ev, owner.cls.find(name), owner, owner.cls, name, place)
            )
        case Named():
            fields = owner.cls.fields or ()
            if name in fields:
                return owner[fields.index(name)]
            return _bound(ev, owner.cls.find(name), owner, owner.cls, name, place)
    value = owner.cls.find(name)
    if name in owner.names and not isinstance(value, Wrapped):
        return owner.names[name]
    if (
        value is MISSING
        and MODULE in owner.cls.bases
        and name in ("register_buffer", "register_parameter")
    ):
        return Method(owner, name)
    return _bound(ev, value, owner, owner.cls, name, place)


def _bound(ev: Reader, value: Any, self: Any, cls: Class, name: str, place: Place) -> Any:
    match value:
        case Wrapped(kind="staticmethod", function=function):
            return function
        case Wrapped(kind="classmethod", function=function):
            return Partial(function, (cls,), {})
        case Wrapped(kind="property", function=function) if self is not None:
            return ev.call(function, [self], {}, place)
        case Function() if self is not None:
            return Partial(value, (self,), {})
    return (
        Unknown(place, f"`.{name}` of `{cls.name}`")
        if value is MISSING or isinstance(value, Wrapped)
        else value
    )


def store(ev: Reader, owner: Class | Instance, name: str, value: Any, place: Place) -> None:
    """Assign `owner.name = value`."""
    cls = owner if isinstance(owner, Class) else owner.cls
    if isinstance(cls.find(name), Wrapped) or set(cls.bases) & set(ENUMS):
        place.refuse(
            "not-in-language",
            f"`.{name}` of `{cls.name}` is set",
            "use an attribute without a setter",
        )
    if isinstance(owner, Instance) and cls.frozen:
        place.refuse(
            "raises", f"a `{cls.name}` is frozen and cannot be changed", "create another one"
        )
    ev.changing(owner, place)
    if isinstance(value, Tensor) and value.name is None:
        value.name = name
    owner.names[name] = value


def inherited(scope: Scope, place: Place) -> Super:
    """Return the value of `super()`."""
    if not isinstance(scope, scopes.Local) or scope.owner is None or not scope.names:
        place.refuse("not-in-language", "`super()` is outside a method", "name the class")
    return Super(scope.owner, next(iter(scope.names.values())))


# --- calls ------------------------


def called(
    ev: Reader, callee: Any, args: Sequence[Any], keywords: Mapping[str, Any], place: Place
) -> Any:
    """Return the result of calling a class or an instance."""
    if not isinstance(callee, Class):
        return ev.call(caller(callee, place), [callee, *args], keywords, place)
    if callee.members is not None:
        if (
            len(args) == 1
            and type(args[0]) in (int, Member, str)
            and plain(args[0]) in callee.members
            and not keywords
        ):
            return callee.members[plain(args[0])]
        place.refuse("bad-call", f"`{callee.name}` has no such member", "name a member")
    if callee.fields is not None:
        return _tuple(callee, args, keywords, place)
    made = Instance(callee, {}, ev.context)
    init = callee.find("__init__")
    if callee.data is not None and init is MISSING:
        made.names.update(records.filled(ev, callee, args, keywords, place))
        after = callee.find("__post_init__")
        if after is not MISSING:
            ev.call(after, [made], {}, place)
    elif isinstance(init, Function):
        ev.call(init, [made, *args], keywords, place)
    elif args or keywords or init is not MISSING:
        place.refuse("bad-call", f"`{callee.name}` takes no arguments", f"write `{callee.name}()`")
    return made


def _tuple(cls: Class, args: Sequence[Any], keywords: Mapping[str, Any], place: Place) -> Named:
    given = dict(zip(cls.fields or (), args, strict=False)) | dict(keywords)
    known = {name: given.get(name, cls.names.get(name, MISSING)) for name in cls.fields or ()}
    if (
        len(given) != len(args) + len(keywords)
        or set(given) - set(known)
        or MISSING in known.values()
    ):
        place.refuse("bad-call", f"wrong arguments for `{cls.name}`", f"pass {', '.join(known)}")
    return Named(known.values(), cls)


def caller(instance: Any, place: Place) -> Function:
    """Return the method that runs when an instance is called."""
    names = ("__call__", "forward") if MODULE in instance.cls.bases else ("__call__",)
    found = next((f for name in names if isinstance(f := instance.cls.find(name), Function)), None)
    if found is None:
        message = f"a `{instance.cls.name}` cannot be called: it has no `__call__`"
        place.refuse("bad-call", message, "call one of its methods")
    return found


def method(
    ev: Reader,
    owner: Instance,
    name: str,
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    place: Place,
) -> None:
    """Run `register_buffer` or `register_parameter` of a torch module."""
    given = dict(zip(("name", "tensor", "persistent"), args, strict=False)) | dict(keywords)
    value = given.get("tensor", given.get("param", MISSING))
    if not isinstance(given.get("name"), str) or value is MISSING:
        place.refuse(
            "bad-call", f"`{name}` needs a name and a tensor", "write the name as a literal"
        )
    if name == "register_buffer":
        # The module may convert it or load another number.
        value = tensors.owned(
            value, place, grad=isinstance(value, Tensor) and value.grad, follows=True
        )
    store(ev, owner, given["name"], value, place)
