"""The state of reading a source, and the interface between parts of the evaluator."""

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
    """A check of the source that the kernels do not perform."""

    note: str
    tensors: tuple[Tensor, ...]
    called: bool
    """True if the check is in the mod or its factory, and not at module level."""

    def concerns(self, used: set[Tensor]) -> bool:
        return self.called or any(tensor in used for tensor in self.tensors)


class Reader(ABC):
    """Counts of steps and calls, and a record of created and changed values.

    `Evaluator` adds evaluation.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.depth = 0
        self.of_a_pair = False
        """True while a mod is inlined: only terms and numbers are allowed there."""
        self.detaches = False
        """True inside `torch.no_grad()`, where operations have no gradient."""
        self.context: object = self
        """The current source: a module, EXPR (this object), or a mod."""
        self.main: Frame | None = None
        """The first module."""
        self.made: dict[int, tuple[Any, object]] = {}
        """Lists and dictionaries by their identity, with the context that made them."""
        self.spoiled: dict[int, tuple[Any, Unknown]] = {}
        """Values that unread code may have changed."""
        self.learned: dict[int, tuple[Any, Tensor]] = {}
        """Tensors with one element that the source makes trainable, by the identity of the
        number.
        """
        self.patched: dict[str, Unknown] = {}
        """Names of other packages that the source assigns."""
        self.renamed = False
        """True if the source sets attributes of functions."""
        self.symbols: dict[ast.AST, Symbols] = {}
        self.too_long = 0
        self.notes: dict[str, None] = {}
        """Assumptions, as text for the user."""
        self.unchecked: list[Unchecked] = []

    # Values, as an `Evaluator` finds them ------------------------

    @abstractmethod
    def expression(self, node: ast.expr, frame: Scope, source: Source) -> Any:
        """Return the value of an expression."""

    @abstractmethod
    def call(
        self, callee: Any, args: Sequence[Any], keywords: Mapping[str, Any], place: Place
    ) -> Any:
        """Call a callee of any kind."""

    @abstractmethod
    def operate(self, fn: str, args: tuple[Any, ...], place: Place) -> Any:
        """Apply a Python operator to operands of any kind."""

    @abstractmethod
    def attribute(self, owner: Any, name: str, place: Place) -> Any:
        """Return `owner.name`."""

    @abstractmethod
    def item(self, owner: Any, index: Any, place: Place) -> Any:
        """Return `owner[index]`."""

    @abstractmethod
    def items(self, value: Any, place: Place) -> Iterable[Any]:
        """Return the items of a loop."""

    @abstractmethod
    def defined(
        self, node: ast.FunctionDef | ast.Lambda | ast.ClassDef, scope: Frame | Scope, place: Place
    ) -> Any:
        """Return the function or class of a definition."""

    @abstractmethod
    def bind(self, node: ast.Import | ast.ImportFrom, frame: Frame, place: Place) -> None:
        """Bind the names of an `import`."""

    @abstractmethod
    def learn(self, value: Any, grad: bool, place: Place) -> Any:
        """Set `value.requires_grad = grad` for all names of the tensor."""

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
            hint = "end the recursion earlier"
            place.refuse("too-deep", f"calls nest more than {MAX_CALLS} deep", hint)
        self.depth += 1
        try:
            return work()
        finally:
            self.depth -= 1

    @contextmanager
    def reading(self, context: object, of_a_pair: bool = False) -> Iterator[None]:
        """Read a module or a mod, with its own count of steps. A mod may start reading a module."""
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
        """Record a list or a dictionary that the current source creates."""
        self.made.setdefault(id(value), (value, self.context))
        return value

    def changing(self, value: Any, place: Place) -> None:
        """Refuse to change a value that the current mod or module did not create."""
        made = (
            value.context
            if isinstance(value, Frame | Class | Instance)
            else self.made.get(id(value), (None, None))[1]
        )
        if made is self.context or (self.context is self and made is self.main):
            return
        if self.of_a_pair:
            hint = "create a new value: PyTorch does not define how often it calls a mod"
            place.refuse("not-in-language", "a mod changes a value outside it", hint)
        hint = "bind the value where it is used"
        place.refuse("not-in-language", "a value of another file is changed here", hint)

    def external(self, path: str) -> Any:
        """Return the value of a name of another package."""
        return self.patched.get(path) or constant(path)

    def note(self, text: str) -> None:
        """Record an assumption for the user."""
        self.notes[text] = None

    # Known values ------------------------

    def decided(self, value: Any, node: ast.expr, source: Source) -> bool:
        """True if a condition of the control flow holds."""
        if isinstance(value, Term | Part):
            hint = "write `torch.where(condition, a, b)`, and `&`, `|`, `~` for `and`, `or`, `not`"
            Place(source, node).refuse("data-dependent", "a branch depends on the pair", hint)
        if isinstance(value, Tensor):
            hint = "use numbers of the source in the condition"
            Place(source, node).refuse(
                "data-dependent", "a branch depends on the elements of a tensor", hint
            )
        if isinstance(value, Method):
            value = Unknown(Place(source, node), f"`.{value.name}`")
        if isinstance(value, Unknown):
            self.untold(value)
        if isinstance(value, Instance) and any(
            value.cls.find(name) is not MISSING for name in ("__bool__", "__len__")
        ):
            value = Unknown(Place(source, node), f"the truth value of {kind(value)}")
            self.untold(value)
        return (
            bool(value)
            if is_number(value) or isinstance(value, str | tuple | list | dict)
            else value is not None
        )

    def untold(self, value: Unknown) -> NoReturn:
        if value.error is not None:
            raise KgenError(value.error.diagnostics)
        message = f"{value.what} cannot be determined without running the source"
        value.place.refuse("not-known", message, value.hint)
