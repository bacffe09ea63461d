"""Values of expressions while a source is read: numbers, terms of a pair, tensors, functions."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kgen.diagnostics import KgenError
from kgen.flex.source import Place

MAX_DEPTH = 100


class Term:
    """A value of one (query, key) pair: a torch operation, by name, on terms and numbers.

    `var` has a name, `const` a number, `read` a tensor and its indices. Terms are shared, and
    compared by identity.
    """

    __slots__ = ("args", "changes", "depth", "fn", "label", "place")

    depth: int

    def __init__(self, fn: str, args: Sequence[Any], place: Place) -> None:
        self.fn = fn
        self.args = tuple(plain(arg) for arg in args)
        self.place = place
        self.label: str | None = None
        """The user's name of the value."""
        self.changes = self.args[0].changes if fn == "read" else 0
        """Number of changes of the tensor at the time of the read."""
        self.depth = 1 + max((arg.depth for arg in self.args if isinstance(arg, Term)), default=0)
        if self.depth > MAX_DEPTH:
            message = f"the expression nests more than {MAX_DEPTH} deep"
            place.refuse("too-deep", message, "split it, or move numbers into a tensor")


class Least(float):
    """The smallest number of a dtype.

    In `where` it means minus infinity, elsewhere it is a normal number.
    """


class FromEnd(int):
    """A negative index, counted from the end of its dimension."""


@dataclass(eq=False)
class Root:
    """Memory that tensors share."""

    changed: bool = False


@dataclass(eq=False)
class Tensor:
    """A tensor of the source. Rank, extents and dtype are None if unknown."""

    place: Place
    name: str | None = None
    shape: tuple[int | None, ...] | None = None
    dtype: str | None = None
    grad: bool = False
    origin: str = ""
    """The origin of the tensor, for a comment."""
    open: bool = False
    """True if its extents depend on values. Then indices do not determine them."""
    changes: int = 0
    """Number of in-place changes."""
    follows: bool = False
    """True if a module owns it and may convert its floating-point dtype."""
    detached_from: Tensor | None = None
    """The tensor with the same elements from which this one is detached."""
    facts: Any = None
    """Proved facts about its integers (`kgen.flex.ascending.Facts`), until a change."""
    roots: tuple[Root, ...] = field(default_factory=lambda: (Root(),))
    """Memory that it may be a view of."""

    def change(self) -> None:
        """Record an in-place change."""
        self.changes += 1
        self.forget()

    def forget(self) -> None:
        """Discard the facts about its elements."""
        for root in self.roots:
            root.changed = True


@dataclass(frozen=True, eq=False)
class Part:
    """A tensor with some indices. It becomes a term when all dimensions have one."""

    tensor: Tensor
    indices: tuple[Any, ...]
    place: Place


def note_change(value: Any) -> None:
    """Record an in-place change of a tensor, of its rows or elements, or of several tensors."""
    match value:
        case Tensor():
            value.change()
        case Part(tensor=tensor):
            tensor.change()
        case list() | tuple():
            for item in value:
                note_change(item)


def changes_in_place(name: str) -> bool:
    """True for the name of a function or method that changes its argument: `neg_`, `__setitem__`,
    `__iadd__`.
    """
    if name.endswith("__"):
        return name == "__setitem__" or name.startswith("__i")
    return name.endswith("_") and name not in ("requires_grad_", "share_memory_")


@dataclass(frozen=True)
class External:
    """A name of another package, such as `torch.tanh`, a dtype or a device.

    Equal names are the same object.
    """

    path: str


@dataclass(frozen=True, eq=False)
class Method:
    """A method of a term or a tensor, before its call."""

    owner: Any
    name: str


@dataclass(frozen=True, eq=False)
class DtypeOf:
    """The dtype of a term."""

    term: Term


@dataclass(frozen=True, eq=False)
class Unknown:
    """A value that cannot be determined without running the source.

    It may turn out to be unused.
    """

    place: Place
    what: str
    hint: str = "write its value as a literal"
    error: KgenError | None = None
    """The error of a failed statement, if there is one."""

    def lost(self) -> Unknown:
        """Return the unknown result of an operation on this value."""
        return Unknown(self.place, self.what, self.hint, self.error)


@dataclass(frozen=True, eq=False)
class Extent(Unknown):
    """A length that is known only in a call, or a value computed from lengths.

    Mods use its `term`.
    """

    term: Term | None = None


@dataclass(frozen=True, eq=False)
class Shape(Unknown):
    """The shape of a tensor of unknown rank, without its first `gone` axes."""

    tensor: Tensor | None = None
    gone: int = 0

    def find_item(self, index: Any, place: Place) -> Unknown:
        """Return one length."""
        if self.tensor is None or type(index) is not int:
            return self
        return extent(self.tensor, index if index < 0 else index + self.gone, self)


def extent(tensor: Tensor, axis: int | None, untold: Unknown) -> Extent:
    """Return the length of an axis, by default the only one. Before the mods it is `untold`."""
    while tensor.detached_from is not None:
        tensor = tensor.detached_from
    term = Term("length", (tensor, axis), untold.place)
    return Extent(untold.place, untold.what, untold.hint, term=term)


def measured(value: Any) -> Any:
    """Return the term of a length. Return other values unchanged."""
    return value.term if isinstance(value, Extent) else value


class Passing:
    """The elements of an iterator such as a generator or `map`.

    It must be used where it is created.
    """

    def __init__(self, items: list[Any], once: bool = True, of: Sequence[Any] = ()) -> None:
        self.items = items
        self.once = once
        self.of = [(value, list(value)) for value in of if isinstance(value, list | dict)]
        """The lists that are iterated, with their elements at creation."""
        self.used = False


class Scope(Protocol):
    """Interface for looking up names."""

    def find(self, name: str) -> Any:
        """Return the value, or `MISSING`."""

    def closure(self) -> Scope:
        """Return the scope that functions defined here see."""


MISSING = object()
UNBOUND = object()
"""Value of a name that the function binds later. Python does not look it up in outer scopes."""


@dataclass(eq=False)
class Frame:
    """The names of a call, inside the scope of the function's definition."""

    outer: Scope
    names: dict[str, Any] = field(default_factory=dict)
    bound: frozenset[str] = frozenset()
    """The names that the function binds, with a value or without one."""
    shared: Mapping[str, Scope] = field(default_factory=dict)
    """The frames of names declared `global` or `nonlocal`."""
    context: object = None
    """The current source when the frame was created: a module, EXPR or a mod."""

    def find(self, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        if name in self.shared:
            return self.shared[name].find(name)
        return UNBOUND if name in self.bound else self.outer.find(name)

    def closure(self) -> Scope:
        return self


@dataclass(frozen=True, eq=False)
class Function:
    """A function or a lambda of the source, with its scope and default arguments."""

    node: ast.FunctionDef | ast.Lambda
    place: Place
    scope: Scope
    defaults: Mapping[str, Any]
    results: dict[Any, Any] | None = None
    """Cached results by arguments, for a function with `lru_cache`."""
    owner: Class | None = None
    """The class of a method, for `super()`."""

    def of(self, owner: Class) -> Function:
        return dataclasses.replace(self, owner=self.owner or owner)

    @property
    def name(self) -> str:
        return self.node.name if isinstance(self.node, ast.FunctionDef) else "the lambda"


@dataclass(eq=False)
class Class:
    """A class of the source. `bases` has the paths of all bases from other packages."""

    name: str
    place: Place
    names: dict[str, Any]
    parent: Class | None
    bases: tuple[str, ...]
    context: object
    fields: tuple[str, ...] | None = None
    """The fields of a named tuple."""
    members: dict[Any, Any] | None = None
    """The members of an enumeration, by value."""
    data: dict[str, Any] | None = None
    """The fields of a dataclass, with their defaults: `MISSING`, a value, or a `Fresh`."""
    frozen: bool = False
    """True if attributes of its instances cannot be set."""

    def find(self, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        return self.parent.find(name) if self.parent else MISSING

    def find_items(self, place: Place) -> list[Any] | None:
        """Return the members of an enumeration. For flags they differ between Python versions."""
        unknown = any(isinstance(value, Unknown) for value in self.names.values())
        flags = any(path.endswith("Flag") for path in self.bases)
        return None if self.members is None or unknown or flags else list(self.members.values())


@dataclass(frozen=True, eq=False)
class Fresh:
    """A default that a factory creates for each instance."""

    factory: Any


@dataclass(eq=False)
class Instance:
    """An instance of a class of the source, with its own attributes."""

    cls: Class
    names: dict[str, Any]
    context: object


@dataclass(frozen=True, eq=False)
class Wrapped:
    """A `staticmethod`, a `classmethod` or a `property`."""

    kind: str
    function: Function

    def of(self, owner: Class) -> Wrapped:
        return Wrapped(self.kind, self.function.of(owner))


@dataclass(frozen=True, eq=False)
class Super:
    """`super()` in a method of a class."""

    cls: Class
    self: Any


class Member(int):
    """A member of an integer enumeration."""

    cls: Class
    label: str

    def __new__(cls, value: int, of: Class, label: str) -> Member:
        made = super().__new__(cls, value)
        made.cls, made.label = of, label
        return made


class Narrow:
    """A numpy scalar whose arithmetic rounds or wraps around, unlike Python's."""


class NarrowInt(Narrow, int):
    """A numpy scalar of an integer dtype."""


class NarrowFloat(Narrow, float):
    """A numpy scalar of a floating-point dtype."""


def plain(value: Any) -> Any:
    """Convert members of enumerations and numpy scalars to numbers, as torch does."""
    match value:
        case Member() | NarrowInt():
            return int(value)
        case NarrowFloat():
            return float(value)
        case tuple() | list():
            return (
                type(value)(plain(item) for item in value)
                if type(value) in (tuple, list)
                else value
            )
    return value


class Named(tuple[Any, ...]):
    """A named tuple."""

    cls: Class

    def __new__(cls, values: Iterable[Any], of: Class) -> Named:
        made = super().__new__(cls, values)
        made.cls = of
        return made


@dataclass(frozen=True, eq=False)
class Partial:
    """A function with some arguments bound."""

    function: Any
    args: tuple[Any, ...]
    keywords: Mapping[str, Any]


def is_number(value: Any) -> bool:
    """A Python number or truth value."""
    return isinstance(value, bool | int | float)


def is_callable(value: Any) -> bool:
    """True if the source may call the value."""
    if isinstance(value, Instance):
        return any(isinstance(value.cls.find(name), Function) for name in ("__call__", "forward"))
    return isinstance(value, Function | Partial | External | Method)


def kind(value: Any) -> str:
    """Return a description of a value for messages."""
    match value:
        case None:
            return "None"
        case Term():
            return "a value of the pair"
        case Tensor() | Part():
            return "a tensor"
        case Function() | Partial() | Method():
            return "a function"
        case External(path=path):
            return f"`{path}`"
        case bool():
            return "a truth value"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case tuple() | list():
            return "a sequence"
        case Class(name=name):
            return f"the class `{name}`"
        case Instance(cls=cls):
            return f"a `{cls.name}`"
        case Unknown(what=what):
            return what
    return "this"
