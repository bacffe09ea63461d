"""Functions of the source: definitions and calls."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kgen.flex import calls, expressions, scopes, statements
from kgen.flex.reader import Reader
from kgen.flex.source import Place
from kgen.flex.statements import Returned
from kgen.flex.values import Function, Scope, Tensor, is_number


def defined(ev: Reader, node: ast.FunctionDef | ast.Lambda, scope: Scope, place: Place) -> Any:
    """Return the function of a definition. Decorators and default arguments are evaluated once."""
    given = node.args
    listed = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    decorators = [(ev.expression(d, scope, place.source), Place(place.source, d)) for d in listed]
    names = [a.arg for a in (*given.posonlyargs, *given.args)]
    last = names[len(names) - len(given.defaults) :]
    defaults = dict(
        zip(last, expressions.elements(ev, given.defaults, scope, place.source), strict=True)
    )
    for argument, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        if value is not None:
            defaults[argument.arg] = ev.expression(value, scope, place.source)
    made: Any = Function(node, place, scope.closure(), defaults)
    for decorator, at in reversed(decorators):
        made = calls.decorated(ev, decorator, made, at)
    return made


def inlined(
    ev: Reader, f: Function, args: Sequence[Any], keywords: Mapping[str, Any], place: Place
) -> Any:
    """Return the result of a call. The body is read with the arguments bound to its parameters."""
    ev.step(place)
    if f.results is not None and not ev.of_a_pair:
        return _kept(ev, f, args, keywords, place)
    frame = scopes.Local(f.scope, arguments(ev, f, args, keywords, place), _symbols(ev, f.node))
    frame.context = ev.context
    frame.owner = f.owner
    if isinstance(f.node, ast.Lambda):
        return ev.deeper(lambda: ev.expression(f.node.body, frame, f.place.source), place)
    if any(isinstance(n, ast.Yield | ast.YieldFrom) for s in f.node.body for n in _own(s)):
        place.refuse("not-in-language", f"`{f.name}` is a generator", "return a value")

    def body() -> Any:
        assert isinstance(f.node, ast.FunctionDef)
        try:
            statements.run(ev, f.node.body, frame, f.place.source)
        except Returned as returned:
            return returned.value
        return None

    return ev.deeper(body, place)


def _kept(
    ev: Reader, f: Function, args: Sequence[Any], keywords: Mapping[str, Any], place: Place
) -> Any:
    """Return the result of a function with `lru_cache`.

    Calls with equal arguments return the same object.
    """
    results = f.results
    assert results is not None
    key = (tuple(args), tuple(keywords.items()))
    if not all(
        is_number(a) or a is None or isinstance(a, str) for a in (*args, *keywords.values())
    ):
        message = "the cached calls of this function are unknown"
        place.refuse("not-known", message, "leave out `lru_cache`, or call it with numbers")
    if key not in results:
        results[key] = inlined(ev, dataclasses.replace(f, results=None), args, keywords, place)
    return results[key]


def _symbols(ev: Reader, node: ast.FunctionDef | ast.Lambda) -> scopes.Symbols:
    if node not in ev.symbols:
        ev.symbols[node] = scopes.bound(scopes.body(node))
    return ev.symbols[node]


def arguments(
    ev: Reader, f: Function, args: Sequence[Any], keywords: Mapping[str, Any], place: Place
) -> dict[str, Any]:
    """Bind the arguments of a call to their parameters."""
    given = f.node.args
    names = [a.arg for a in (*given.posonlyargs, *given.args)]
    values = dict(zip(names, args, strict=False))
    extra = tuple(args[len(names) :])
    if extra and given.vararg is None:
        message = f"`{f.name}` takes {len(names)} arguments, got {len(args)}"
        place.refuse("bad-call", message, f"write `{signature(f)}`")
    rest: dict[str, Any] = {}
    known = {*names, *(a.arg for a in given.kwonlyargs)} - {a.arg for a in given.posonlyargs}
    for name, value in keywords.items():
        if name in values:
            place.refuse("bad-call", f"`{f.name}` gets `{name}` twice", "pass it once")
        if name not in known and given.kwarg is None:
            place.refuse(
                "bad-call", f"`{f.name}` has no argument `{name}`", f"write `{signature(f)}`"
            )
        (values if name in known else rest)[name] = value
    for name in (*names, *(a.arg for a in given.kwonlyargs)):
        if name not in values:
            if name not in f.defaults:
                message = f"`{f.name}` needs its argument `{name}`"
                place.refuse("bad-call", message, f"write `{signature(f)}`")
            values[name] = f.defaults[name]
    if given.vararg is not None:
        values[given.vararg.arg] = extra
    if given.kwarg is not None:
        values[given.kwarg.arg] = ev.own(rest)
    for name, value in values.items():
        if isinstance(value, Tensor) and value.name is None:
            value.name = name
    return values


def signature(f: Function) -> str:
    """Return the call signature of a function."""
    given = f.node.args
    names = [a.arg for a in (*given.posonlyargs, *given.args)]
    return f"{f.name}({', '.join(names)})"


def _own(node: ast.AST) -> Iterable[ast.AST]:
    """Yield the nodes of a statement, without the nodes of nested functions."""
    waiting = [node]
    while waiting:
        part = waiting.pop()
        yield part
        if not isinstance(part, ast.FunctionDef | ast.Lambda | ast.GeneratorExp):
            waiting += ast.iter_child_nodes(part)
