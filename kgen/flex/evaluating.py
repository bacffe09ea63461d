"""Symbolic evaluation of the source. Calls are inlined, and the result is the term that a pair
computes.

The evaluator walks syntax trees only. Control flow may depend on numbers of the source;
`torch.where` must handle choices that depend on the pair. Steps, calls and items are limited, so
that no source takes long.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kgen.diagnostics import shown
from kgen.flex import (
    calls,
    changes,
    classes,
    effects,
    elementwise,
    expressions,
    functions,
    instances,
    methods,
    modules,
    numbers,
    several,
    tensors,
    toplevel,
)
from kgen.flex.comparing import known
from kgen.flex.reader import Reader
from kgen.flex.source import Place, Source
from kgen.flex.values import (
    MISSING,
    Class,
    DtypeOf,
    External,
    Frame,
    Function,
    Instance,
    Member,
    Method,
    Named,
    Part,
    Partial,
    Passing,
    Scope,
    Super,
    Tensor,
    Term,
    Unknown,
    is_callable,
    kind,
)


class Evaluator(Reader):
    """Reader of one source and of the files that it needs."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[Path, modules.Module] = {}

    def module(self, path: Path) -> modules.Module:
        """Return the module of a file. Each file is read once."""
        key = Path(os.path.realpath(path))  # unlike `resolve`, it accepts a loop of symbolic links
        if key not in self.loaded:
            if len(self.loaded) >= modules.MAX_MODULES:
                Place(Source(path.as_posix(), ""), ast.Pass()).refuse(
                    "too-large",
                    f"the source needs more than {modules.MAX_MODULES} files",
                    "import from fewer files",
                )
            module = self.loaded[key] = modules.load(path, self)
            self.main = self.main or module
            toplevel.read(self, module)
        return self.loaded[key]

    # Expressions ------------------------

    def expression(self, node: ast.expr, frame: Scope, source: Source) -> Any:
        """Return the value of an expression."""
        value = expressions.found(self, node, frame, source)
        if id(value) in self.spoiled:
            return self.spoiled[id(value)][1]
        if id(value) in self.learned:
            return self.learned[id(value)][1]
        return self.own(value) if type(value) in (list, dict) else value

    def operate(self, fn: str, args: tuple[Any, ...], place: Place) -> Any:
        """Apply a Python operator to operands of any kind."""
        args = tuple(int(a) if isinstance(a, Member) else a for a in args)
        if fn == "matmul":
            place.refuse(
                "reduction", "`@` is a reduction", "the kernel computes the matrix products"
            )
        args, length = elementwise.of_lengths(self, fn, args, place)
        if length is not None:
            return length
        if any(isinstance(a, Unknown | DtypeOf) for a in args):
            first = next(known(a, place) for a in args if isinstance(a, Unknown | DtypeOf))
            if self.of_a_pair:
                self.untold(first)
            return first
        if any(isinstance(a, Class | Instance) for a in args):
            special = any(
                a.cls.find(f"__{fn}__") is not MISSING for a in args if isinstance(a, Instance)
            )
            if fn not in ("eq", "ne") or special:
                word = next(kind(a) for a in args if isinstance(a, Class | Instance))
                place.refuse("bad-call", f"{word} is used as a number", "use its attributes")
            return (args[0] is args[1]) == (fn == "eq")
        if any(isinstance(a, Term | Part | Tensor) for a in args):
            return elementwise.applied(self, fn, args, place)
        if any(is_callable(a) for a in args) and fn not in ("eq", "ne"):
            word = next(kind(a) for a in args if is_callable(a))
            place.refuse("bad-call", f"{word} is used as a number", "call it")
        return numbers.apply(fn, args, place)

    def attribute(self, owner: Any, name: str, place: Place) -> Any:
        """Return `owner.name`."""
        match owner:
            case modules.Module():
                value = owner.member(name)
                if value is MISSING:
                    place.refuse(
                        "unknown-name",
                        f"the module has no {shown(name)}",
                        "check the names that it defines",
                    )
                return value
            case External(path=path):
                return self.external(f"{path}.{name}")
            case Term() | Part() | Tensor() if name == "data":
                return methods.method(self, Method(owner, "detach"), [], {}, place)
            case Term() | Part() | Tensor():
                return tensors.attribute(owner, name, place)
            case Function() if name == "__name__" and not self.renamed:
                return owner.name
            case Unknown():
                return owner.lost()
            case Class() | Instance() | Super() | Member() | Named():
                return instances.attribute(self, owner, name, place)
            case list() | dict() | str() | int() | float():
                return Method(owner, name)
        found = getattr(owner, "find_attribute", None)
        return found(name, place) if found else Unknown(place, f"`.{name}`")

    def item(self, owner: Any, index: Any, place: Place) -> Any:
        """Return `owner[index]`."""
        match owner:
            case Tensor() | Part():
                return tensors.indexed(
                    self, owner, index if isinstance(index, tuple) else (index,), place
                )
            case list() | tuple() | dict() | range() | str():
                if isinstance(index, Term | Part):
                    hint = "put the numbers into a tensor, `torch.tensor([...])`"
                    place.refuse("data-dependent", "the pair indexes a sequence of Python", hint)
                if isinstance(index, Unknown):
                    self.untold(index)
                try:
                    return owner[index]
                except (LookupError, TypeError, ValueError):
                    place.refuse(
                        "bad-index", "there is no such element", "check the length of the sequence"
                    )
            case Class(members=dict()) if isinstance(index, str):
                return self.attribute(owner, index, place)
            case Term():
                place.refuse("bad-index", "a value of the pair has no elements", "index a tensor")
        if found := getattr(owner, "find_item", None):
            return found(index, place)
        what = owner.lost() if isinstance(owner, Unknown) else Unknown(place, "this element")
        return owner if isinstance(owner, External) else what

    def items(self, value: Any, place: Place) -> Iterable[Any]:
        """Return the items of a loop."""
        if isinstance(value, Term | Part | Tensor | Method):
            return several.rows(value, place)
        if (held := getattr(value, "find_items", lambda place: None)(place)) is not None:
            return list(held)
        if isinstance(value, Unknown):
            self.untold(value)
        if isinstance(value, Passing):
            if value.used and value.once:
                place.refuse(
                    "not-in-language",
                    "this loop would consume an iterator",
                    "make a list of it, `list(...)`",
                )
            value.used = True
            return value.items
        if not isinstance(value, list | tuple | range | dict):
            place.refuse(
                "not-in-language",
                f"{kind(value)} cannot be looped over",
                "loop over a tuple, or a range",
            )
        return value

    # Calls and definitions ------------------------

    def call(
        self, callee: Any, args: Sequence[Any], keywords: Mapping[str, Any], place: Place
    ) -> Any:
        """Call a callee of any kind."""
        match callee:
            case Function():
                return functions.inlined(self, callee, args, keywords, place)
            case Partial():
                return self.call(
                    callee.function, [*callee.args, *args], {**callee.keywords, **keywords}, place
                )
            case External():
                return calls.external(self, callee.path, list(args), dict(keywords), place)
            case Class() | Instance():
                return instances.called(self, callee, args, keywords, place)
            case Method(owner=Instance() as owner, name=name):
                return instances.method(self, owner, name, args, keywords, place)
            case Method():
                return methods.method(self, callee, list(args), dict(keywords), place)
            case Unknown() if not self.of_a_pair:
                effects.escaped(self, [*args, *keywords.values()], place)
                return callee.lost()
            case Unknown():
                self.untold(callee)
        what = tensors.called(callee) if isinstance(callee, Tensor) else kind(callee)
        place.refuse("bad-call", f"{what} is not a function of the source", "call a function")

    def defined(
        self, node: ast.FunctionDef | ast.Lambda | ast.ClassDef, scope: Scope | Frame, place: Place
    ) -> Any:
        """Return the function or class of a definition."""
        if isinstance(node, ast.ClassDef):
            assert isinstance(scope, Frame)
            return classes.defined(self, node, scope, place)
        return functions.defined(self, node, scope, place)

    def bind(self, node: ast.Import | ast.ImportFrom, frame: Frame, place: Place) -> None:
        """Bind the names of an `import`."""
        root: Scope = frame
        while isinstance(root, Frame) and isinstance(root.outer, Frame):
            root = root.outer
        if isinstance(root, modules.Module):
            root.bind(node, frame)
            return
        for alias in node.names:
            name = alias.asname or alias.name.split(".")[0]
            path = alias.name if alias.asname else name
            if isinstance(node, ast.ImportFrom):
                path = f"{node.module or ''}.{alias.name}"
            changes.put(self, frame, name, self.external(path), place)

    def learn(self, value: Any, grad: bool, place: Place) -> Any:
        """Set `value.requires_grad = grad` for all names of the tensor."""
        match value:
            case Tensor():
                value.grad = grad
            case Term() if grad:
                made = tensors.owned(value, place, grad=True)
                made.name = value.label
                self.learned[id(value)] = value, made
                return made
        return value
