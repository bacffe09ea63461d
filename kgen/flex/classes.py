"""Classes of the source: their constants, methods, instances, enumerations and named tuples.

A class is read only if Python's default machinery makes it. A metaclass, a decorator or a special method that changes
how attributes are found leaves it unknown.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kgen.flex import records, scopes, statements, tensors
from kgen.flex.source import Place
from kgen.flex.values import (
    MISSING,
    Class,
    External,
    Frame,
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

if TYPE_CHECKING:
    from kgen.flex.evaluating import Evaluator

ENUMS = {"enum.Enum": False, "enum.Flag": False, "enum.IntEnum": True, "enum.IntFlag": True}
"""The bases of enumerations; true if a member is an integer."""
MODULE = "torch.nn.Module"
_BASES = {
    *ENUMS,
    MODULE,
    "builtins.object",
    "typing.NamedTuple",
    "abc.ABC",
    "typing.Generic",
    "typing.Protocol",
}
_SPECIAL = frozenset(
    {
        *("__new__", "__getattribute__", "__getattr__", "__setattr__", "__delattr__", "__init_subclass__"),
        *("__get__", "__set__", "__set_name__", "__class_getitem__", "__prepare__", "_missing_"),
        *("_generate_next_value_", "__slots__"),
    }
) - {"__slots__"}
AUTO = External("enum.auto()")


class Body(Frame):
    """The names of a class body, which its methods do not see."""

    outer_place: Place

    def closure(self) -> Scope:
        return self.outer.closure()


def defined(ev: Evaluator, node: ast.ClassDef, scope: Frame, place: Place) -> Any:
    """A class where it is defined; its body is read once."""
    bases = [ev.expression(base, scope, place.source) for base in node.bases]
    bases = [b for b in bases if b != External("builtins.object")]
    paths = [b.path for b in bases if isinstance(b, External)]
    own = [b for b in bases if isinstance(b, Class)]
    decorators = [ev.expression(d, scope, place.source) for d in node.decorator_list]
    of_data = records.options(decorators.pop()) if records.marked(decorators) else None
    body = Body(scope, bound=scopes.bound(node.body).bound, context=ev.context)
    body.shared = dict.fromkeys(scopes.bound(node.body).module | scopes.bound(node.body).outer, scope)
    for statement in node.body:
        statements.run(ev, [statement], body, place.source)
        if set(paths) & set(ENUMS):
            _automatic(body, any(path.endswith("Flag") for path in paths))
    strange = next((name for name in body.names if name in _SPECIAL), None)
    if (
        len(own) > 1
        or len(own) + len(paths) < len(bases)
        or set(paths) - _BASES
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
        made.fields, made.data, made.frozen = made.parent.fields, made.parent.data, made.parent.frozen
    if of_data is not None and not records.fill(made, node, of_data):
        return Unknown(place, f"the class `{node.name}`")
    if "typing.NamedTuple" in paths:
        made.fields = tuple(
            s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
        )
    if set(made.bases) & set(ENUMS):
        _number(made)
    return made


def _automatic(body: Body, flags: bool) -> None:
    """Give `auto()` its number: the next one, or the next power of two."""
    before = [value for name, value in body.names.items() if type(value) is int and not name.startswith("_")]
    for name, value in body.names.items():
        if value == AUTO and before and before[-1] != max(before):
            # Versions of Python differ in what comes next.
            body.names[name] = Unknown(body.outer_place, f"`{name}`")
        elif value == AUTO:
            last = before[-1] if before else 0
            body.names[name] = (1 << last.bit_length()) if flags else last + 1


def _number(cls: Class) -> None:
    """Make members of the constants of an enumeration."""
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
                Member(int(value), cls, name) if whole else Instance(cls, {**own, "name": name}, cls.context)
            )
        cls.names[name] = found[value]
    cls.members = found


# --- attributes ------------------------


def attribute(ev: Evaluator, owner: Any, name: str, place: Place) -> Any:
    """`owner.name` of a class, an instance, a member of an enumeration or `super()`."""
    match owner:
        case Class():
            return _bound(ev, owner.find(name), None, owner, name, place)
        case Super(cls=cls, self=self):
            value = cls.parent.find(name) if cls.parent else MISSING
            if value is MISSING and name == "__init__" and set(cls.bases) <= _BASES:
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
    if value is MISSING and MODULE in owner.cls.bases and name in ("register_buffer", "register_parameter"):
        return Method(owner, name)
    return _bound(ev, value, owner, owner.cls, name, place)


def _bound(ev: Evaluator, value: Any, self: Any, cls: Class, name: str, place: Place) -> Any:
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


def store(ev: Evaluator, owner: Class | Instance, name: str, value: Any, place: Place) -> None:
    """`owner.name = value`."""
    cls = owner if isinstance(owner, Class) else owner.cls
    if isinstance(cls.find(name), Wrapped) or set(cls.bases) & set(ENUMS):
        place.refuse(
            "not-in-language", f"`.{name}` of `{cls.name}` is set", "use an attribute without a setter"
        )
    if isinstance(owner, Instance) and cls.frozen:
        place.refuse("raises", f"a `{cls.name}` is frozen, and is changed here", "make another one")
    ev.changing(owner, place)
    if isinstance(value, Tensor) and value.name is None:
        value.name = name
    owner.names[name] = value


def inherited(scope: Scope, place: Place) -> Super:
    """`super()`."""
    if not isinstance(scope, scopes.Local) or scope.owner is None or not scope.names:
        place.refuse("not-in-language", "`super()` stands outside of a method", "name the class")
    return Super(scope.owner, next(iter(scope.names.values())))


# --- calls ------------------------


def called(ev: Evaluator, callee: Any, args: Sequence[Any], keywords: Mapping[str, Any], place: Place) -> Any:
    """An instance of a class, or what an instance gives when it is called."""
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
    if len(given) != len(args) + len(keywords) or set(given) - set(known) or MISSING in known.values():
        place.refuse("bad-call", f"`{cls.name}` is not called so", f"give it {', '.join(known)}")
    return Named(known.values(), cls)


def caller(instance: Any, place: Place) -> Function:
    """The method that runs when an instance is called."""
    names = ("__call__", "forward") if MODULE in instance.cls.bases else ("__call__",)
    found = next((f for name in names if isinstance(f := instance.cls.find(name), Function)), None)
    if found is None:
        message = f"a `{instance.cls.name}` is called, and has no `__call__`"
        place.refuse("bad-call", message, "name a method of it")
    return found


def method(
    ev: Evaluator, owner: Instance, name: str, args: Sequence[Any], keywords: Mapping[str, Any], place: Place
) -> None:
    """`register_buffer` and `register_parameter` of a module of torch."""
    given = dict(zip(("name", "tensor", "persistent"), args, strict=False)) | dict(keywords)
    value = given.get("tensor", given.get("param", MISSING))
    if not isinstance(given.get("name"), str) or value is MISSING:
        place.refuse("bad-call", f"`{name}` needs a name and a tensor", "write the name as a literal")
    if name == "register_buffer":
        # The module may convert it, and load another number.
        value = tensors.owned(value, place, grad=isinstance(value, Tensor) and value.grad, follows=True)
    store(ev, owner, given["name"], value, place)
