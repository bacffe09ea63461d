"""Names that statements bind and the frames that hold them, by Python's scoping rules."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kgen.flex.source import Place
from kgen.flex.values import Class, Frame, Scope

Callable_ = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class Symbols:
    """Names of one scope: bound names, and names declared as belonging to another scope."""

    bound: frozenset[str]
    outer: frozenset[str]
    """Names declared `nonlocal`."""
    module: frozenset[str]
    """Names declared `global`."""


class _Bound(ast.NodeVisitor):
    """Collector of the names that nodes bind in their own scope."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.outer: set[str] = set()
        self.module: set[str] = set()

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.names.add(node.id)

    def _function(self, node: Callable_) -> None:
        # Decorators and default arguments are evaluated in the enclosing scope, the body is not.
        if not isinstance(node, ast.Lambda):
            self.names.add(node.name)
            self._all(node.decorator_list)
        self._all(node.args.defaults)
        self._all(filter(None, node.args.kw_defaults))

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _function

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.add(node.name)
        self._all((*node.decorator_list, *node.bases, *(k.value for k in node.keywords)))

    def visit_comprehension(self, node: ast.comprehension) -> None:
        # Targets are names of the comprehension. `:=` inside binds in the enclosing scope.
        self._all((node.iter, *node.ifs))

    def visit_alias(self, node: ast.alias) -> None:
        self.names.add(node.asname or node.name.split(".")[0])

    def _named(self, node: ast.ExceptHandler | ast.MatchAs | ast.MatchStar) -> None:
        if node.name:
            self.names.add(node.name)
        self.generic_visit(node)

    visit_ExceptHandler = visit_MatchAs = visit_MatchStar = _named

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        if node.rest:
            self.names.add(node.rest)
        self.generic_visit(node)

    def visit_Global(self, node: ast.Global) -> None:
        self.module.update(node.names)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self.outer.update(node.names)

    def _all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)


def bound(nodes: Iterable[ast.AST]) -> Symbols:
    """Return the names that nodes of one scope bind."""
    found = _Bound()
    found._all(nodes)
    names = found.names - found.outer - found.module
    return Symbols(frozenset(names), frozenset(found.outer), frozenset(found.module))


def parameters(given: ast.arguments) -> list[str]:
    """Return the names of all parameters."""
    rest = [a for a in (given.vararg, given.kwarg) if a is not None]
    return [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs, *rest)]


def body(node: Callable_) -> Sequence[ast.AST]:
    """Return the nodes of a function that run when it is called."""
    return [node.body] if isinstance(node, ast.Lambda) else node.body


class Local(Frame):
    """The names of one call. A name that the function binds is not looked up in outer scopes."""

    def __init__(self, scope: Scope, names: dict[str, object], symbols: Symbols) -> None:
        super().__init__(scope, names)
        self.owner: Class | None = None
        self.bound = symbols.bound
        module = scope.closure()
        while isinstance(module, Frame) and isinstance(module.outer, Frame):
            module = module.outer
        self.shared = dict.fromkeys(symbols.module, module)
        for name in symbols.outer:
            self.shared[name] = _holder(scope, name)


def _holder(scope: Scope, name: str) -> Scope:
    """Return the enclosing frame of a `nonlocal` name."""
    while isinstance(scope, Frame):
        if name in scope.names or name in scope.bound:
            return scope
        scope = scope.shared.get(name, scope.outer)
    return scope


class Comprehension(Frame):
    """The names of a comprehension. `:=` binds in the enclosing frame."""


def store(frame: Frame, name: str, place: Place) -> Frame:
    """Return the frame that an assignment to a name changes."""
    holder = frame.shared.get(name, frame)
    if not isinstance(holder, Frame):
        message = f"`{name}` belongs to an enclosing function, which is not read"
        place.refuse("not-in-language", message, "use another name for the value")
    return holder


def around(frame: Scope) -> Scope:
    """Return the frame in which `:=` binds."""
    while isinstance(frame, Comprehension):
        frame = frame.outer
    return frame
