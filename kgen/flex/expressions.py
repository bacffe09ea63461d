"""The value of each kind of expression, found in Python's order of evaluation."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from kgen.flex import (
    changes,
    comparing,
    comprehensions,
    effects,
    instances,
    naming,
    numbers,
    scopes,
)
from kgen.flex.operators import UNARY, binary
from kgen.flex.reader import Reader
from kgen.flex.source import Place, Source
from kgen.flex.values import External, Frame, Scope, Unknown


def found(ev: Reader, node: ast.expr, frame: Scope, source: Source) -> Any:
    """Return the value of an expression.

    If it cannot be read, it and everything that it could change are unknown.
    """
    place = Place(source, node)
    ev.step(place)
    read = _READ.get(type(node))
    if read is None:
        return effects.lost(ev, node, frame, None, place)
    return read(ev, node, frame, place)


def elements(ev: Reader, nodes: Sequence[ast.expr], scope: Scope, source: Source) -> list[Any]:
    """Return the values of several expressions. Starred expressions are unpacked."""
    values: list[Any] = []
    for node in nodes:
        place = Place(source, node)
        if isinstance(node, ast.Starred):
            over = ev.expression(node.value, scope, source)
            for item in ev.items(over, place):
                ev.step(place)
                numbers.sized(values, 1, place).append(item)
        else:
            values.append(ev.expression(node, scope, source))
    return values


def _constant(ev: Reader, node: ast.Constant, frame: Scope, place: Place) -> Any:
    if isinstance(node.value, bytes | complex) or node.value is Ellipsis:
        return Unknown(place, "this literal")
    return node.value


def _unary(ev: Reader, node: ast.UnaryOp, frame: Scope, place: Place) -> Any:
    value = ev.expression(node.operand, frame, place.source)
    if isinstance(node.op, ast.Not):
        return not ev.decided(value, node, place.source)
    return ev.operate(UNARY[type(node.op)], (value,), place)


def _binary(ev: Reader, node: ast.BinOp, frame: Scope, place: Place) -> Any:
    operands = elements(ev, (node.left, node.right), frame, place.source)
    return ev.operate(binary(node.op), tuple(operands), place)


def _boolean(ev: Reader, node: ast.BoolOp, frame: Scope, place: Place) -> Any:
    stops = isinstance(node.op, ast.Or)
    for part in node.values[:-1]:
        value = ev.expression(part, frame, place.source)
        if ev.decided(value, node, place.source) == stops:
            return value
    return ev.expression(node.values[-1], frame, place.source)


def _compared(ev: Reader, node: ast.Compare, frame: Scope, place: Place) -> Any:
    return comparing.chain(ev, node, frame, place.source)


def _chosen(ev: Reader, node: ast.IfExp, frame: Scope, place: Place) -> Any:
    test = ev.decided(ev.expression(node.test, frame, place.source), node.test, place.source)
    return ev.expression(node.body if test else node.orelse, frame, place.source)


def _called(ev: Reader, node: ast.Call, scope: Scope, place: Place) -> Any:
    source = place.source
    callee = ev.expression(node.func, scope, source)
    if callee == External("builtins.super") and not node.args:
        return instances.inherited(scope, place)
    args = elements(ev, node.args, scope, source)
    keywords: dict[str, Any] = {}
    for keyword in node.keywords:
        value = ev.expression(keyword.value, scope, source)
        if keyword.arg is not None:
            keywords[keyword.arg] = value
        elif isinstance(value, dict):
            keywords |= {str(name): item for name, item in value.items()}
        else:
            place.refuse("not-in-language", "`**` needs a dictionary", "write them out")
    return ev.call(callee, args, keywords, place)


def _attribute(ev: Reader, node: ast.Attribute, frame: Scope, place: Place) -> Any:
    return ev.attribute(ev.expression(node.value, frame, place.source), node.attr, place)


def _subscript(ev: Reader, node: ast.Subscript, scope: Scope, place: Place) -> Any:
    owner = ev.expression(node.value, scope, place.source)
    return ev.item(owner, ev.expression(node.slice, scope, place.source), place)


def _tuple(ev: Reader, node: ast.Tuple, frame: Scope, place: Place) -> Any:
    return tuple(elements(ev, node.elts, frame, place.source))


def _list(ev: Reader, node: ast.List, frame: Scope, place: Place) -> Any:
    return elements(ev, node.elts, frame, place.source)


def _lambda(ev: Reader, node: ast.Lambda, frame: Scope, place: Place) -> Any:
    return ev.defined(node, frame, place)


def _named(ev: Reader, node: ast.NamedExpr, frame: Scope, place: Place) -> Any:
    value = ev.expression(node.value, frame, place.source)
    holder = scopes.around(frame)
    if isinstance(holder, Frame):
        changes.assign(ev, node.target, value, holder, place.source)
    return value


def _dictionary(ev: Reader, node: ast.Dict, frame: Scope, place: Place) -> Any:
    names = elements(ev, [key for key in node.keys if key is not None], frame, place.source)
    if len(names) < len(node.keys) or not all(
        isinstance(name, str | int | float | None) for name in names
    ):
        return effects.lost(ev, node, frame, None, place)
    return dict(zip(names, elements(ev, node.values, frame, place.source), strict=True))


def _comprehension(
    ev: Reader, node: ast.ListComp | ast.GeneratorExp | ast.DictComp, frame: Scope, place: Place
) -> Any:
    return comprehensions.listed(ev, node, frame, place.source)


def _text(ev: Reader, node: ast.JoinedStr, frame: Scope, place: Place) -> Any:
    elements(ev, node.values, frame, place.source)
    return Unknown(place, "this text")


def _formatted(ev: Reader, node: ast.FormattedValue, frame: Scope, place: Place) -> Any:
    return ev.expression(node.value, frame, place.source)


def _slice(ev: Reader, node: ast.Slice, frame: Scope, place: Place) -> Any:
    parts = (node.lower, node.upper, node.step)
    return slice(*(part and ev.expression(part, frame, place.source) for part in parts))


_READ: dict[type[ast.expr], Callable[[Reader, Any, Scope, Place], Any]] = {
    ast.Constant: _constant,
    ast.Name: naming.value,
    ast.UnaryOp: _unary,
    ast.BinOp: _binary,
    ast.BoolOp: _boolean,
    ast.Compare: _compared,
    ast.IfExp: _chosen,
    ast.Call: _called,
    ast.Attribute: _attribute,
    ast.Subscript: _subscript,
    ast.Tuple: _tuple,
    ast.List: _list,
    ast.Lambda: _lambda,
    ast.NamedExpr: _named,
    ast.Dict: _dictionary,
    ast.ListComp: _comprehension,
    ast.GeneratorExp: _comprehension,
    ast.DictComp: _comprehension,
    ast.JoinedStr: _text,
    ast.FormattedValue: _formatted,
    ast.Slice: _slice,
}
"""The reader of each kind of expression; other kinds are unknown."""
