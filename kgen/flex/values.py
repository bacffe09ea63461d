"""What expressions of a Python source stand for while it is read: numbers, terms of a pair, tensors, functions."""

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
    """A value of one (query, key) pair: an operation of torch over terms and numbers, known by its name.

    `var` has a name, `const` a number, `read` a tensor and its indices. Terms are shared, and compared by identity.
    """

    __slots__ = ("args", "changes", "depth", "fn", "label", "place")

    depth: int

    def __init__(self, fn: str, args: Sequence[Any], place: Place) -> None:
        self.fn = fn
        self.args = tuple(plain(arg) for arg in args)
        self.place = place
        self.label: str | None = None
        """What the user called it."""
        self.changes = self.args[0].changes if fn == "read" else 0
        """How often the tensor that it reads had been changed."""
        self.depth = 1 + max((arg.depth for arg in self.args if isinstance(arg, Term)), default=0)
        if self.depth > MAX_DEPTH:
            message = f"the expression nests more than {MAX_DEPTH} deep"
            place.refuse("too-deep", message, "split it, or move numbers into a tensor")


class Least(float):
    """The least number of a dtype: a number like others, but what `where` has for a pair that is left out, as
    minus infinity."""


class FromEnd(int):
    """An index below zero, which counts from the end of its dimension."""


@dataclass(eq=False)
class Root:
    """Memory that tensors share."""

    changed: bool = False


@dataclass(eq=False)
class Tensor:
    """A tensor of the source, which the kernel is given. `None` is what cannot be told: its rank, extents, dtype."""

    place: Place
    name: str | None = None
    shape: tuple[int | None, ...] | None = None
    dtype: str | None = None
    grad: bool = False
    origin: str = ""
    """Where it comes from, for a comment."""
    open: bool = False
    """Set if its extents depend on values: an index does not say them."""
    changes: int = 0
    """How often it was changed in place."""
    follows: bool = False
    """It belongs to a module, which may convert its floating-point tensors to another dtype."""
    detached_from: Tensor | None = None
    """The tensor whose elements these are, where no gradient goes back to it."""
    facts: Any = None
    """The facts that the source proves of its integers (`kgen.flex.ascending.Facts`), until it changes them."""
    roots: tuple[Root, ...] = field(default_factory=lambda: (Root(),))
    """The memory that it may be a view of."""

    def change(self) -> None:
        """Note a change in place."""
        self.changes += 1
        self.forget()

    def forget(self) -> None:
        """Take nothing of its elements for granted."""
        for root in self.roots:
            root.changed = True


@dataclass(frozen=True, eq=False)
class Part:
    """A tensor with some of its indices: as many more make a term of it."""

    tensor: Tensor
    indices: tuple[Any, ...]
    place: Place


def note_change(value: Any) -> None:
    """Note a change in place of a tensor, of a row or an element of one, or of each of several."""
    match value:
        case Tensor():
            value.change()
        case Part(tensor=tensor):
            tensor.change()
        case list() | tuple():
            for item in value:
                note_change(item)


def changes_in_place(name: str) -> bool:
    """True for the name of a function or method that changes what it is given: `neg_`, `__setitem__`, `__iadd__`."""
    if name.endswith("__"):
        return name == "__setitem__" or name.startswith("__i")
    return name.endswith("_") and name not in ("requires_grad_", "share_memory_")


@dataclass(frozen=True)
class External:
    """A name of another package, as `torch.tanh`, and what of torch is no more than a name here: dtypes, devices.

    Names that are equal are the same.
    """

    path: str


@dataclass(frozen=True, eq=False)
class Method:
    """An attribute of a term or a tensor that is going to be called."""

    owner: Any
    name: str


@dataclass(frozen=True, eq=False)
class DtypeOf:
    """The dtype of a term."""

    term: Term


@dataclass(frozen=True, eq=False)
class Unknown:
    """What cannot be told without running the source; it may still be of no account."""

    place: Place
    what: str
    hint: str = "write its value as a literal"
    error: KgenError | None = None
    """The message, where a statement that failed has one."""

    def lost(self) -> Unknown:
        """The unknown result of an operation on this value."""
        return Unknown(self.place, self.what, self.hint, self.error)


@dataclass(frozen=True, eq=False)
class Extent(Unknown):
    """A length that only the tensor of a call says, or a value computed from such lengths. Mods use its `term`."""

    term: Term | None = None


@dataclass(frozen=True, eq=False)
class Shape(Unknown):
    """The shape of a tensor of unknown rank, without its first `gone` axes."""

    tensor: Tensor | None = None
    gone: int = 0

    def find_item(self, index: Any, place: Place) -> Unknown:
        """One length of it."""
        if self.tensor is None or type(index) is not int:
            return self
        return extent(self.tensor, index if index < 0 else index + self.gone, self)


def extent(tensor: Tensor, axis: int | None, untold: Unknown) -> Extent:
    """The length of an axis, by default of the only one, which is `untold` ahead of the mods."""
    while tensor.detached_from is not None:
        tensor = tensor.detached_from
    term = Term("length", (tensor, axis), untold.place)
    return Extent(untold.place, untold.what, untold.hint, term=term)


def measured(value: Any) -> Any:
    """A length as what it is in a mod, a value of every pair; anything else as it is."""
    return value.term if isinstance(value, Extent) else value


class Passing:
    """The elements of an iterator such as a generator or `map`. It is used where it stands, and has no name."""

    def __init__(self, items: list[Any], once: bool = True, of: Sequence[Any] = ()) -> None:
        self.items = items
        self.once = once
        self.of = [(value, list(value)) for value in of if isinstance(value, list | dict)]
        """The lists that are run over, and what they held."""
        self.used = False


class Scope(Protocol):
    """Where names are looked up."""

    def find(self, name: str) -> Any:
        """The value, or `MISSING`."""

    def closure(self) -> Scope:
        """The scope that functions defined in it see."""


MISSING = object()
UNBOUND = object()
"""A name that the function binds further down: Python does not look it up outside."""


@dataclass(eq=False)
class Frame:
    """The names of a call, within the scope that its function was defined in."""

    outer: Scope
    names: dict[str, Any] = field(default_factory=dict)
    bound: frozenset[str] = frozenset()
    """The names that the function binds, with a value or without one."""
    shared: Mapping[str, Scope] = field(default_factory=dict)
    """The frames of names that are declared `global` or `nonlocal`."""
    context: object = None
    """The source that was being read when the frame was made: a module, EXPR or a mod."""

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
    """A function or a lambda of the source, with the scope and the default arguments that it was defined with."""

    node: ast.FunctionDef | ast.Lambda
    place: Place
    scope: Scope
    defaults: Mapping[str, Any]
    results: dict[Any, Any] | None = None
    """By arguments, where the function keeps what it returned."""
    owner: Class | None = None
    """The class that it is a method of, for `super()`."""

    def of(self, owner: Class) -> Function:
        return dataclasses.replace(self, owner=self.owner or owner)

    @property
    def name(self) -> str:
        return self.node.name if isinstance(self.node, ast.FunctionDef) else "the lambda"


@dataclass(eq=False)
class Class:
    """A class of the source. `bases` has the paths of all bases that are of other packages."""

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
    """Set if attributes of its instances cannot be set."""

    def find(self, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        return self.parent.find(name) if self.parent else MISSING

    def find_items(self, place: Place) -> list[Any] | None:
        """The members of an enumeration. Versions of Python differ in those of flags."""
        unknown = any(isinstance(value, Unknown) for value in self.names.values())
        flags = any(path.endswith("Flag") for path in self.bases)
        return None if self.members is None or unknown or flags else list(self.members.values())


@dataclass(frozen=True, eq=False)
class Fresh:
    """The default of a field that a function makes for each instance."""

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
    """A member of an enumeration of integers, which is one."""

    cls: Class
    label: str

    def __new__(cls, value: int, of: Class, label: str) -> Member:
        made = super().__new__(cls, value)
        made.cls, made.label = of, label
        return made


class Narrow:
    """A scalar of numpy whose arithmetic is not that of Python: it rounds, or wraps around."""


class NarrowInt(Narrow, int):
    """A scalar of an integer dtype."""


class NarrowFloat(Narrow, float):
    """A scalar of a floating-point dtype."""


def plain(value: Any) -> Any:
    """A value as functions of torch see it: members of enumerations and scalars of numpy are numbers."""
    match value:
        case Member() | NarrowInt():
            return int(value)
        case NarrowFloat():
            return float(value)
        case tuple() | list():
            return type(value)(plain(item) for item in value) if type(value) in (tuple, list) else value
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
    """A function with some of its arguments."""

    function: Any
    args: tuple[Any, ...]
    keywords: Mapping[str, Any]


def is_number(value: Any) -> bool:
    """A Python number or truth value."""
    return isinstance(value, bool | int | float)


def is_callable(value: Any) -> bool:
    """Whether the source may call it."""
    if isinstance(value, Instance):
        return any(isinstance(value.cls.find(name), Function) for name in ("__call__", "forward"))
    return isinstance(value, Function | Partial | External | Method)


def kind(value: Any) -> str:
    """A value in words."""
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
