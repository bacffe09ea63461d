"""The names and values that unread code could change. Later uses of them are refused.

Code is unread if one of its statements cannot be read, or if another package calls it. The analysis
uses only syntax and is conservative: a value is kept only if no code within reach can change it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any, TypeGuard

from kgen.diagnostics import KgenError
from kgen.flex import scopes
from kgen.flex.packages import PYTHON
from kgen.flex.reader import Reader
from kgen.flex.source import Place
from kgen.flex.tables import DTYPES, ELEMENTWISE, SAME
from kgen.flex.values import (
    MISSING,
    UNBOUND,
    Class,
    External,
    Frame,
    Function,
    Instance,
    Method,
    Part,
    Partial,
    Passing,
    Scope,
    Tensor,
    Term,
    Unknown,
    Wrapped,
)

WILD = frozenset(
    (
        "exec",
        "eval",
        "globals",
        "locals",
        "vars",
        "setattr",
        "delattr",
        "__import__",
        "reload",
        "_getframe",
    )
)
"""Names through which code can bind any name."""
HIDDEN = frozenset(
    {
        *("__dict__", "__globals__", "__code__", "__defaults__", "__kwdefaults__", "__closure__"),
        *("__class__", "__builtins__", "f_globals", "f_locals"),
    }
)
"""Attributes through which code can change functions and modules."""
_HARMLESS_METHODS = (frozenset(ELEMENTWISE) | (SAME - {"requires_grad_"}) | frozenset(DTYPES)) | {
    *(
        "to",
        "view",
        "reshape",
        "size",
        "dim",
        "sum",
        "item",
        "tolist",
        "unsqueeze",
        "squeeze",
        "expand",
    ),
    *(
        "get",
        "items",
        "keys",
        "values",
        "copy",
        "index",
        "count",
        "format",
        "join",
        "split",
        "strip",
    ),
    *(
        "lower",
        "upper",
        "startswith",
        "endswith",
        "type",
        "flatten",
        "permute",
        "transpose",
        "new_ones",
    ),
    *(
        "new_zeros",
        "new_full",
        "new_tensor",
        "numel",
        "any",
        "all",
        "cumsum",
        "max",
        "min",
        "is_available",
    ),
}
_HARMLESS_PACKAGES = frozenset(
    {
        *(
            "torch",
            "math",
            "cmath",
            "functools",
            "itertools",
            "typing",
            "numpy",
            "os",
            "sys",
            "warnings",
        ),
        *(
            "logging",
            "time",
            "enum",
            "dataclasses",
            "collections",
            "builtins",
            "argparse",
            "pathlib",
        ),
    }
)
_CHANGING = frozenset(
    {"init", "random", "modules", "partialmethod", "insert", "remove", "addHandler"}
)


def harmless(path: str) -> bool:
    """True if a function of another package does not change its arguments."""
    first, *rest = path.split(".")
    if first not in _HARMLESS_PACKAGES or _CHANGING & set(rest):
        return False
    last = rest[-1] if rest else ""
    if first == "builtins" and len(rest) > 1:
        return False
    return not (last.endswith("_") or last in WILD)


class Reach:
    """The values and names that some code can reach."""

    def __init__(self, ev: Reader) -> None:
        self.ev = ev
        self.waiting: list[tuple[ast.AST, Scope]] = []
        self.seen: set[tuple[int, int]] = set()
        self.held: list[Any] = []
        """Values kept alive, because `seen` stores identities."""
        self.loaded: list[Any] = []
        self.given: list[Any] = []
        self.names: list[tuple[Scope, str]] = []
        self.wild: list[Scope] = []
        self.risky = False

    # Code ------------------------

    def close(self) -> None:
        """Follow all functions that the code can reach."""
        while self.waiting:
            self._read(*self.waiting.pop())

    def add(self, node: ast.AST, scope: Scope) -> None:
        key = (id(node), id(scope))
        if key not in self.seen:
            self.seen.add(key)
            self.held.append(scope)
            self.waiting.append((node, scope))

    def value(self, value: Any) -> None:
        """Add a value that the code sees, and the code of the value."""
        match value:
            case Function(node=node, scope=scope, defaults=defaults):
                if (id(node), id(scope)) not in self.seen:
                    self.add(node, scope)
                    for inner in defaults.values():
                        self.value(inner)
            case Partial(function=function, args=args, keywords=keywords):
                for inner in (function, *args, *keywords.values()):
                    self.value(inner)
            case Method(owner=owner):
                self.value(owner)
            case Class() | Instance() | Wrapped():
                if (id(value), 0) not in self.seen:
                    self.seen.add((id(value), 0))
                    self.loaded.append(value)
                    for inner in _parts(value):
                        self.value(inner)
            case list() | tuple() | dict():
                if (id(value), 0) not in self.seen:
                    self.seen.add((id(value), 0))
                    self.loaded.append(value)
                    for inner in value.values() if isinstance(value, dict) else value:
                        self.value(inner)
            case _:
                self.loaded.append(value)

    def _read(self, node: ast.AST, scope: Scope) -> None:
        parts = list(ast.walk(node))
        inner = {p.id for p in parts if isinstance(p, ast.Name) and not isinstance(p.ctx, ast.Load)}
        inner |= {p.arg for p in parts if isinstance(p, ast.arg)}
        made = node.args.args[0].arg if _makes(node) else None
        owners = {id(p.value) for p in parts if isinstance(p, ast.Attribute)}
        called = {id(p.func) for p in parts if isinstance(p, ast.Call)}
        for part in parts:
            match part:
                case ast.Global(names=names):
                    self.names += [(_root(scope), name) for name in names]
                case ast.Nonlocal(names=names):
                    self.names += [(scope, name) for name in names]
                case ast.Name(id=name) if name in WILD:
                    self.wild.append(scope)
                case ast.Attribute(attr=name) if name in WILD or name in HIDDEN:
                    self.wild.append(scope)
                case ast.Attribute(attr="modules", value=ast.Name()) if id(part) not in called:
                    self.wild.append(scope)
                case ast.alias(name=name) if name in WILD or name == "modules":
                    self.wild.append(scope)
                case ast.Name(id=name, ctx=ast.Load()):
                    found = self._found(scope, name)
                    # Attributes of a module are resolved separately.
                    if not (isinstance(found, Frame) and id(part) in owners):
                        self.value(found)
                case ast.Subscript(ctx=ast.Store() | ast.Del()):
                    self.risky = True
                case ast.Attribute(ctx=ast.Store(), value=ast.Name(id=name)) if name == made:
                    pass  # an attribute of the new object
                case ast.Attribute(ctx=ast.Store() | ast.Del(), value=owner, attr=name):
                    self.risky = True
                    known = self._resolved(owner, scope, inner)
                    if isinstance(known, Frame):
                        self.names.append((known, name))
                case ast.Attribute(ctx=ast.Load()):
                    self.value(self._resolved(part, scope, inner))
                case ast.AugAssign(target=ast.Name(id=name)):
                    self.risky |= not self._of_numbers(name, parts, scope)
                case ast.Call(func=func):
                    self.risky |= not self._harmless(func, parts, scope, inner)
                case ast.Import() | ast.ImportFrom():
                    self.loaded += self._imported(part, scope)
                case ast.Yield() | ast.YieldFrom() | ast.Await():
                    self.risky = True

    def _found(self, scope: Scope, name: str) -> Any:
        try:
            return scope.find(name)
        except KgenError:
            return None

    def _imported(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> list[Any]:
        """Return the modules of the source that unread code imports."""
        root = _root(scope)
        try:
            return list(root.imported(node)) if hasattr(root, "imported") else []
        except KgenError:
            return []

    def _resolved(self, node: ast.expr, scope: Scope, inner: set[str]) -> Any:
        """Return the value of a dotted name, or None if it is unknown."""
        match node:
            case ast.Name(id=name) if name not in inner:
                value = self._found(scope, name)
                return None if value is UNBOUND else value
            case ast.Attribute(value=owner, attr=name):
                known = self._resolved(owner, scope, inner)
                if isinstance(known, External):
                    return External(f"{known.path}.{name}")
                if isinstance(known, Frame):
                    return self._found(known, name)
        return None

    def _harmless(
        self, func: ast.expr, parts: list[ast.AST], scope: Scope, inner: set[str]
    ) -> bool:
        """True if a call has no effects except the effects of the code that it runs."""
        match func:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="__init__"):
                return True
        if isinstance(func, ast.Name) and func.id not in inner:
            value = self._found(scope, func.id)
            if value is MISSING:
                defined = [p for p in parts if isinstance(p, ast.FunctionDef) and p.name == func.id]
                return func.id in PYTHON or bool(defined)
        else:
            value = self._resolved(func, scope, inner)
        if isinstance(value, External):
            return harmless(value.path)
        if isinstance(value, Function | Partial | Class | Instance):
            return True
        return value is None and isinstance(func, ast.Attribute) and func.attr in _HARMLESS_METHODS

    def _of_numbers(self, name: str, parts: list[ast.AST], scope: Scope) -> bool:
        """True if `name += ...` cannot change a list."""
        values = [
            p.value
            for p in parts
            if isinstance(p, ast.Assign)
            and any(isinstance(t, ast.Name) and t.id == name for t in p.targets)
        ]
        others = sum(
            isinstance(p, ast.Name) and p.id == name and isinstance(p.ctx, ast.Store) for p in parts
        )
        updates = sum(
            isinstance(p, ast.AugAssign) and isinstance(p.target, ast.Name) and p.target.id == name
            for p in parts
        )
        if any(isinstance(p, ast.arg) and p.arg == name for p in parts) or others > updates + len(
            values
        ):
            return False
        if not values:
            return isinstance(self._found(scope, name), bool | int | float | str)
        return all(
            isinstance(v, ast.BinOp | ast.UnaryOp | ast.Compare | ast.Constant) for v in values
        )

    # --- consequences ------------------------

    def spoil(self, unknown: Unknown) -> None:
        """Mark everything that the code could have changed as unknown."""
        self.close()
        for scope, name in self.names:
            _forget(scope, name, unknown)
        for scope in self.wild:
            root = _root(scope)
            if hasattr(root, "forget_all"):
                root.forget_all(unknown)
        if self.risky or self.wild:
            self.given += self.loaded
        for value in self.given:
            self._spoil(value, unknown, set())

    def _spoil(self, value: Any, unknown: Unknown, seen: set[int]) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        match value:
            case Partial(function=function, args=args, keywords=keywords):
                inside: Iterable[Any] = (function, *args, *keywords.values())
            case Method(owner=owner):
                inside = (owner,)
            case Passing(items=items):
                inside = items
            case tuple():
                inside = value
            case Class() | Instance():
                self.ev.spoiled[id(value)] = (value, unknown)
                inside = _parts(value)
            case list() | dict():
                self.ev.spoiled[id(value)] = (value, unknown)
                inside = list(value.values()) if isinstance(value, dict) else value
            case Frame():
                inside = list(value.names.values())
                if hasattr(value, "forget_all"):
                    value.forget_all(unknown)
            case Tensor() | Part():
                (value.tensor if isinstance(value, Part) else value).forget()
                return
            case Term() if not self.ev.of_a_pair:
                self.ev.spoiled[id(value)] = (value, unknown)
                return
            case _:
                return
        for item in inside:
            self._spoil(item, unknown, seen)


def _makes(node: ast.AST) -> TypeGuard[ast.FunctionDef]:
    """True for the definition of `__init__`."""
    return isinstance(node, ast.FunctionDef) and node.name == "__init__" and bool(node.args.args)


def _parts(value: Any) -> list[Any]:
    match value:
        case Wrapped(function=function):
            return [function]
        case Instance(cls=cls, names=names):
            return [cls, *names.values()]
        case Class(parent=parent, names=names):
            return [*names.values(), *([parent] if parent else [])]
    return []


def _root(scope: Scope) -> Scope:
    """Return the module that contains a scope."""
    while isinstance(scope, Frame) and isinstance(scope.outer, Frame):
        scope = scope.outer
    return scope


def _forget(scope: Scope, name: str, unknown: Unknown) -> None:
    """Forget the value of a name in the scope that has it."""
    while isinstance(scope, Frame):
        if name in scope.names or not isinstance(scope.outer, Frame):
            scope.names[name] = unknown
            return
        scope = scope.outer


def lost(
    ev: Reader, node: ast.stmt | ast.expr, frame: Scope, error: KgenError | None, place: Place
) -> Unknown:
    """Forget everything that unread code could bind or change.

    The code may have run partly or fully.
    """
    symbols = scopes.bound([node])
    names = sorted(symbols.bound)
    unknown = Unknown(place, "the effect of this code", "write its value as a literal", error)
    reach = Reach(ev)
    reach.add(node, frame)
    reach.spoil(unknown)
    for name in names:
        assert isinstance(frame, Frame)
        if name == "*":
            frame.forget_all(unknown)  # type: ignore[attr-defined]
            continue
        scopes.store(frame, name, place).names[name] = Unknown(
            place, f"`{name}`", unknown.hint, error
        )
    return unknown


def changes(ev: Reader, node: ast.expr, scope: Scope) -> bool:
    """True if an expression could change a value or bind a name."""
    reach = Reach(ev)
    reach.add(node, scope)
    reach.close()
    named = any(isinstance(part, ast.NamedExpr) for part in ast.walk(node))
    return bool(reach.risky or reach.wild or reach.names or named)


def runs_changes(ev: Reader, function: Any) -> bool:
    """True if a call of a function could change a value that outlives it."""
    reach = Reach(ev)
    reach.value(function)
    reach.close()
    return bool(reach.risky or reach.wild or reach.names)


def escaped(ev: Reader, values: Iterable[Any], place: Place) -> None:
    """Forget everything that a call of unread code could change: its list arguments, and the reach
    of its functions.
    """
    reach = Reach(ev)
    reach.given = list(values)
    for value in reach.given:
        reach.value(value)
    error = place.wrong(
        "not-known",
        "this call cannot be read and may change its arguments",
        "pass a copy, `list(...)`, or write the value as a literal",
    )
    reach.spoil(Unknown(place, "the effect of this call", error=error))


__all__ = ["Reach", "escaped", "harmless", "lost"]
