"""Modules of the source: where they lie, and what their names stand for. Nothing is imported.

A name is evaluated when it is asked for, so that what a file does besides is of no account.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kgen.diagnostics import Diagnostic, KgenError
from kgen.flex import source, statements
from kgen.flex.packages import constant
from kgen.flex.source import Place, Source
from kgen.flex.values import MISSING, External, Frame, Scope, Tensor, Term

if TYPE_CHECKING:
    from kgen.flex.evaluating import Evaluator

MAX_MODULES = 64


def find(given: str) -> Path:
    """The file of SOURCE: a path, or the dotted name of a module. Raises `KgenError`."""
    path = Path(given)
    if path.suffix == ".py" or path.exists():
        return path
    found = _located(given.split("."), ["", *sys.path])
    if found is None:
        hint = "name a Python file, or a module that Python would find here"
        raise KgenError(Diagnostic("no-source", "there is no such file or module", given, 1, 1, hint=hint))
    return found


def _located(parts: Sequence[str], places: Sequence[str]) -> Path | None:
    """The file of a module below some folders. Unlike `importlib.util.find_spec`, this runs no package."""
    if not all(part.isidentifier() for part in parts):
        return None
    PathFinder.invalidate_caches()
    search: list[str] | None = list(places)
    for count in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:count]), search)
        if spec is None:
            return None
        search = list(spec.submodule_search_locations) if spec.submodule_search_locations else []
    origin = spec.origin if spec else None
    return Path(os.path.relpath(origin)) if origin and origin.endswith(".py") else None


@dataclass(frozen=True)
class _Binding:
    """A statement that gives a name a meaning; the later one counts."""

    order: int
    statement: ast.stmt


class Module:
    """A file, and its names."""

    def __init__(self, text: Source, evaluator: Evaluator, path: Path | None = None) -> None:
        self.source = text
        self.evaluator = evaluator
        self.path = path
        self.bindings: dict[str, list[_Binding]] = {}
        self.values: dict[tuple[str, int], Any] = {}
        self.frames: dict[int, _Before] = {}
        self.stars: list[ast.ImportFrom] = []
        for order, statement in enumerate(_flat(text.module().body)):
            if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                self.stars.append(statement)
            for name in _bound(statement):
                self.bindings.setdefault(name, []).append(_Binding(order, statement))

    def find(self, name: str, before: float = float("inf")) -> Any:
        """The value of a name, by the last statement ahead of `before` that gives it one."""
        for binding in reversed(self.bindings.get(name, [])):
            if binding.order < before:
                value = self._value(name, binding)
                if value is not MISSING:
                    return value
        for star in self.stars:
            module = self._module((star.module or "").split(".") if star.module else [], star.level)
            if isinstance(module, Module) and (value := module.find(name)) is not MISSING:
                return value
        return MISSING

    def closure(self) -> Scope:
        return self

    def _value(self, name: str, binding: _Binding) -> Any:
        key = (name, binding.order)
        place = Place(self.source, binding.statement)
        if key not in self.values:
            self.values[key] = _WAITING
            self.values[key] = self._evaluated(name, binding)
        if self.values[key] is _WAITING:
            place.refuse("cyclic-name", f"`{name}` is defined by itself", "give the new value another name")
        return self.values[key]

    def _evaluated(self, name: str, binding: _Binding) -> Any:
        statement = binding.statement
        match statement:
            case ast.Import(names=names):
                for alias in names:
                    if alias.asname == name:
                        return self._module(alias.name.split("."), 0)
                    if alias.asname is None and alias.name.split(".")[0] == name:
                        return self._module([name], 0)
            case ast.ImportFrom():
                return self._imported(statement, name)
        match statement:
            case ast.Expr() | ast.Assign(targets=[ast.Subscript()]) | ast.AugAssign(target=ast.Subscript()):
                value = self.find(name, binding.order)
                if isinstance(value, list | dict | Tensor | Term):
                    # One number that is made to learn is another value.
                    return self._run(binding).names.get(name, value)
                return value
        made = self._run(binding).names
        # A list that a loop appended to is the one that was there before.
        return made[name] if name in made else self.find(name, binding.order)

    def _run(self, binding: _Binding) -> _Before:
        """The names that a statement makes; it is run once, whichever of them are asked for."""
        if binding.order not in self.frames:
            frame = self.frames[binding.order] = _Before(self, order=binding.order)
            with self.evaluator.ahead():
                statements.run(self.evaluator, [binding.statement], frame, self.source)
        return self.frames[binding.order]

    def _imported(self, statement: ast.ImportFrom, name: str) -> Any:
        parts = statement.module.split(".") if statement.module else []
        found = self._module(parts, statement.level)
        original = next((a.name for a in statement.names if (a.asname or a.name) == name), name)
        if isinstance(found, Module):
            value = found.find(original)
            return self._module([*parts, original], statement.level) if value is MISSING else value
        return constant(f"{found.path}.{original}")

    def _module(self, parts: list[str], level: int) -> Module | External:
        """A module beside this one or in its package; any other is another package's."""
        outside = External(".".join(parts))
        if self.path is None:
            return outside
        folder = Path(os.path.realpath(self.path)).parent
        if level:
            for _ in range(level - 1):
                folder = folder.parent
        else:
            package = None
            while os.path.isfile(folder / "__init__.py"):
                folder, package = folder.parent, folder.name
            # What lies beside a package is another one, as all that is installed.
            if package is not None and parts[0] != package:
                return outside
        if not parts:
            path: Path | None = folder / "__init__.py"
        else:
            path = _located(parts, [str(folder)])
        if path is None or not os.path.isfile(path):
            return outside
        return self.evaluator.module(path)


_WAITING = object()


@dataclass(eq=False)
class _Before(Frame):
    """The names of a module as a statement of it finds them, and those that it makes. Functions see later ones too."""

    outer: Module
    order: int = 0

    def find(self, name: str) -> Any:
        return self.names[name] if name in self.names else self.outer.find(name, self.order)

    def closure(self) -> Scope:
        return self.outer


def _flat(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements in order, with those of `try` and `with` in their place."""
    for statement in body:
        if isinstance(statement, ast.Try | ast.With):
            yield from _flat(statement.body)
        else:
            yield statement


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement gives a meaning to."""
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case ast.Import(names=names):
            yield from (alias.asname or alias.name.split(".")[0] for alias in names)
        case ast.ImportFrom(names=names):
            yield from (alias.asname or alias.name for alias in names)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=str()))):
            # A method may change what it is called on.
            yield name
        case ast.Assign(targets=targets):
            for target in targets:
                yield from _stored(target)
        case ast.AnnAssign(target=target, value=ast.expr()) | ast.AugAssign(target=target):
            yield from _stored(target)
        case ast.For(target=target, body=body, orelse=orelse):
            yield from _stored(target)
            for inner in (*body, *orelse):
                yield from _bound(inner)
        case ast.If(body=body, orelse=orelse) | ast.While(body=body, orelse=orelse):
            for inner in (*body, *orelse):
                yield from _bound(inner)


def _stored(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
        yield target.value.id
    elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
        if target.attr == "requires_grad":
            yield target.value.id
    elif isinstance(target, ast.Starred):
        yield from _stored(target.value)
    elif isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _stored(element)


def load(path: Path, evaluator: Evaluator) -> Module:
    """A file as a module. Raises `KgenError`."""
    return Module(source.read(path), evaluator, path)


def functions(module: Module) -> list[str]:
    """The names of a module's own functions, for hints."""
    return [
        name
        for name, bindings in module.bindings.items()
        if isinstance(bindings[-1].statement, ast.FunctionDef)
    ]
