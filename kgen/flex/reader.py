"""The state of reading a source, and what all parts of the evaluator ask of each other while they read it."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from kgen.diagnostics import KgenError
from kgen.flex.packages import constant
from kgen.flex.scopes import Symbols
from kgen.flex.source import Place, Source
from kgen.flex.values import (
    MISSING,
    Class,
    Frame,
    Instance,
    Method,
    Part,
    Scope,
    Tensor,
    Term,
    Unknown,
    is_number,
    kind,
)

MAX_STEPS = 50_000
MAX_CALLS = 50


@dataclass(frozen=True)
class Unchecked:
    """A check of the source that the spec leaves to its user."""

    note: str
    tensors: tuple[Tensor, ...]
    called: bool
    """True if the check is in the mod, or in what makes it, and not in a module beside it."""

    def concerns(self, used: set[Tensor]) -> bool:
        return self.called or any(tensor in used for tensor in self.tensors)


class Reader(ABC):
    """Counts steps and calls, and knows what was made and changed so far. An `Evaluator` adds how values are found."""

    def __init__(self) -> None:
        self.steps = 0
        self.depth = 0
        self.of_a_pair = False
        """True while a mod is inlined: only terms and numbers are allowed there."""
        self.detaches = False
        """True inside a block of `torch.no_grad()`, whose operations have no gradient."""
        self.context: object = self
        """The source that is being read: a module, EXPR (this object), or a mod."""
        self.main: Frame | None = None
        """The first module."""
        self.made: dict[int, tuple[Any, object]] = {}
        """Lists and dictionaries by their identity, with the context that made them."""
        self.spoiled: dict[int, tuple[Any, Unknown]] = {}
        """Values that unread code may have changed."""
        self.learned: dict[int, tuple[Any, Tensor]] = {}
        """Tensors of one number that the source makes learn, by the identity of the number."""
        self.patched: dict[str, Unknown] = {}
        """Names of other packages that the source sets."""
        self.renamed = False
        """Set if the source sets attributes of functions."""
        self.symbols: dict[ast.AST, Symbols] = {}
        self.too_long = 0
        self.notes: dict[str, None] = {}
        """The assumptions, in words for the user."""
        self.unchecked: list[Unchecked] = []

    # Values, as an `Evaluator` finds them ------------------------

    @abstractmethod
    def expression(self, node: ast.expr, frame: Scope, source: Source) -> Any:
        """The value of an expression."""

    @abstractmethod
    def call(self, callee: Any, args: Sequence[Any], keywords: Mapping[str, Any], place: Place) -> Any:
        """A call of whatever the callee is."""

    @abstractmethod
    def operate(self, fn: str, args: tuple[Any, ...], place: Place) -> Any:
        """An operator of Python on whatever its operands are."""

    @abstractmethod
    def attribute(self, owner: Any, name: str, place: Place) -> Any:
        """`owner.name`."""

    @abstractmethod
    def item(self, owner: Any, index: Any, place: Place) -> Any:
        """`owner[index]`."""

    @abstractmethod
    def items(self, value: Any, place: Place) -> Iterable[Any]:
        """The items that a loop runs over."""

    @abstractmethod
    def defined(
        self, node: ast.FunctionDef | ast.Lambda | ast.ClassDef, scope: Frame | Scope, place: Place
    ) -> Any:
        """A function or a class where it is defined."""

    @abstractmethod
    def bind(self, node: ast.Import | ast.ImportFrom, frame: Frame, place: Place) -> None:
        """The names of an `import`."""

    @abstractmethod
    def learn(self, value: Any, grad: bool, place: Place) -> Any:
        """`value.requires_grad = grad`, under all names of the tensor."""

    # Counting ------------------------

    @property
    def exhausted(self) -> bool:
        return self.steps > MAX_STEPS

    def step(self, place: Place) -> None:
        self.steps += 1
        if self.exhausted:
            message = f"reading the source takes more than {MAX_STEPS} steps"
            place.refuse("too-large", message, "write shorter loops, or put numbers into a tensor")

    def deeper(self, work: Any, place: Place) -> Any:
        if self.depth >= MAX_CALLS:
            hint = "a function that calls itself must come to an end"
            place.refuse("too-deep", f"calls nest more than {MAX_CALLS} deep", hint)
        self.depth += 1
        try:
            return work()
        finally:
            self.depth -= 1

    @contextmanager
    def reading(self, context: object, of_a_pair: bool = False) -> Iterator[None]:
        """Read a module, even where a mod is what asks for it, or a mod: steps are counted for each."""
        before = self.context, self.of_a_pair, self.steps, self.depth
        self.context, self.of_a_pair, self.steps, self.depth = context, of_a_pair, 0, 0
        try:
            with self.gradients(True):
                yield
        finally:
            self.context, self.of_a_pair, self.steps, self.depth = before

    @contextmanager
    def gradients(self, enabled: bool) -> Iterator[None]:
        """Enable or disable gradients, as `torch.set_grad_enabled(enabled)` does."""
        before, self.detaches = self.detaches, not enabled
        try:
            yield
        finally:
            self.detaches = before

    # Changes ------------------------

    def own(self, value: Any) -> Any:
        """A list or a dictionary that is made here."""
        self.made.setdefault(id(value), (value, self.context))
        return value

    def changing(self, value: Any, place: Place) -> None:
        """Refuse to change what is older than the mod or the module that is read."""
        made = (
            value.context
            if isinstance(value, Frame | Class | Instance)
            else self.made.get(id(value), (None, None))[1]
        )
        if made is self.context or (self.context is self and made is self.main):
            return
        if self.of_a_pair:
            hint = "make a new value; PyTorch does not say how often it calls a mod"
            place.refuse("not-in-language", "a mod changes what outlives it", hint)
        hint = "bind the value where it is used"
        place.refuse("not-in-language", "what another file made is changed here", hint)

    def external(self, path: str) -> Any:
        """A name of another package."""
        return self.patched.get(path) or constant(path)

    def note(self, text: str) -> None:
        """Say what is assumed."""
        self.notes[text] = None

    # Known values ------------------------

    def decided(self, value: Any, node: ast.expr, source: Source) -> bool:
        """True if a condition of the control flow holds."""
        if isinstance(value, Term | Part):
            hint = "write `torch.where(condition, a, b)`, and `&`, `|`, `~` for `and`, `or`, `not`"
            Place(source, node).refuse("data-dependent", "a branch depends on the pair", hint)
        if isinstance(value, Tensor):
            hint = "decide with numbers of the source"
            Place(source, node).refuse("data-dependent", "a branch depends on what a tensor holds", hint)
        if isinstance(value, Method):
            value = Unknown(Place(source, node), f"`.{value.name}`")
        if isinstance(value, Unknown):
            self.untold(value)
        if isinstance(value, Instance) and any(
            value.cls.find(name) is not MISSING for name in ("__bool__", "__len__")
        ):
            value = Unknown(Place(source, node), f"if {kind(value)} is true")
            self.untold(value)
        return (
            bool(value)
            if is_number(value) or isinstance(value, str | tuple | list | dict)
            else value is not None
        )

    def untold(self, value: Unknown) -> NoReturn:
        if value.error is not None:
            raise KgenError(value.error.diagnostics)
        message = f"{value.what} cannot be told without running the source"
        value.place.refuse("not-known", message, value.hint)
