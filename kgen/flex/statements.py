"""Statements of the source, run over its syntax tree; control flow must be known from numbers of the source."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kgen.flex import numbers, tensors
from kgen.flex.packages import constant
from kgen.flex.source import Place, Source
from kgen.flex.tables import NO_GRAD
from kgen.flex.values import Frame, Method, Part, Tensor, Term, Unknown

if TYPE_CHECKING:
    from kgen.flex.evaluating import Evaluator


class Returned(Exception):
    """`return`, with the value."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Left(Exception):
    """`break`, or `continue`."""

    def __init__(self, ends: bool) -> None:
        self.ends = ends


def run(ev: Evaluator, body: Sequence[ast.stmt], frame: Frame, source: Source) -> None:
    """Statements, in order; names go into the frame."""
    for node in body:
        statement(ev, node, frame, Place(source, node))


def statement(ev: Evaluator, node: ast.stmt, frame: Frame, place: Place) -> None:
    ev.step(place)
    match node:
        case ast.Return():
            value = ev.expression(node.value, frame, place.source) if node.value else None
            raise Returned(value)
        case ast.Assign(targets=[ast.Attribute(value=ast.Name() as named, attr="requires_grad")]):
            learns(ev, named, ev.expression(node.value, frame, place.source), frame, place)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name() as named, attr="requires_grad_"))):
            assign(ev, named, ev.expression(node.value, frame, place.source), frame, place.source)
        case ast.Assign():
            # `mod.__name__ = ...` and elements of tensors make no difference to what a pair computes.
            targets = [t for t in node.targets if not isinstance(t, ast.Attribute)]
            if targets:
                value = ev.expression(node.value, frame, place.source)
                for target in targets:
                    assign(ev, target, value, frame, place.source)
        case ast.AnnAssign(target=ast.Name(), value=ast.expr() as given):
            assign(ev, node.target, ev.expression(given, frame, place.source), frame, place.source)
        case ast.AugAssign(target=ast.Subscript() as target):
            old = ev.subscript(target, frame, place.source)
            new = ev.expression(node.value, frame, place.source)
            assign(ev, target, ev.operate(ev.binary(node.op), (old, new), place), frame, place.source)
        case ast.AugAssign(target=ast.Name() as target):
            old = ev.name(ast.copy_location(ast.Name(target.id), target), frame, place.source)
            if isinstance(old, Term) and sum(value is old for value in frame.names.values()) > 1:
                hint = f"write `{target.id} = {target.id} ...`, which makes a new value"
                place.refuse("not-in-language", "a value that has two names is changed in place", hint)
            new = ev.expression(node.value, frame, place.source)
            value = ev.operate(ev.binary(node.op), (old, new), place)
            assign(ev, node.target, value, frame, place.source)
        case ast.FunctionDef():
            frame.names[node.name] = ev.function(node, frame, place)
        case ast.If():
            value = ev.expression(node.test, frame, place.source)
            if _guards(node) and not ev.of_a_pair and isinstance(value, UNTOLD):
                return
            test = ev.decided(value, node.test, place.source)
            run(ev, node.body if test else node.orelse, frame, place.source)
        case ast.For():
            loop(ev, node, frame, place)
        case ast.While():
            while ev.decided(ev.expression(node.test, frame, place.source), node.test, place.source):
                ev.step(place)
                if body_ends(ev, node.body, frame, place.source):
                    break
        case ast.Break() | ast.Continue():
            raise Left(isinstance(node, ast.Break))
        case ast.Expr(value=ast.Constant()) | ast.Pass() | ast.AnnAssign():
            pass
        case ast.Expr():
            ev.expression(node.value, frame, place.source)
        case ast.Assert():
            if not ev.of_a_pair:
                checked(ev, node, frame, place)
        case ast.Import() | ast.ImportFrom():
            imported(ev, node, frame)
        case ast.With(items=items) if any(_stops_gradients(item.context_expr) for item in items):
            try:
                with ev.without_gradients():
                    run(ev, node.body, frame, place.source)
            except Returned as returned:
                kept = returned.value
                raise Returned(tensors.detached(kept, place) if ev.of_a_pair else kept) from None
        case ast.With():
            run(ev, node.body, frame, place.source)
        case ast.Raise():
            place.refuse("raises", "the source raises an exception here", "give it what it asks for")
        case ast.ClassDef():
            frame.names[node.name] = Unknown(place, f"the class `{node.name}`")
        case _:
            word = type(node).__name__.lower()
            place.refuse("not-in-language", f"a statement `{word}` cannot be read", "write it in another way")


def _stops_gradients(context: ast.expr) -> bool:
    """`torch.no_grad()`, `torch.inference_mode()`, `torch.set_grad_enabled(False)`."""
    if not isinstance(context, ast.Call):
        return False
    function = context.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    off = [isinstance(a, ast.Constant) and a.value is False for a in context.args]
    return name in NO_GRAD or (name == "set_grad_enabled" and off == [True])


UNTOLD = Unknown | Tensor | Part | Term | Method
"""What a check of arguments is taken to find right."""


def _guards(node: ast.If) -> bool:
    """Whether it does no more than raise."""
    return not node.orelse and all(isinstance(statement, ast.Raise) for statement in node.body)


def checked(ev: Evaluator, node: ast.Assert, frame: Frame, place: Place) -> None:
    test = ev.expression(node.test, frame, place.source)
    if not isinstance(test, UNTOLD) and not test:
        place.refuse("raises", "the source asserts here what does not hold", "give it what it asks for")


def learns(ev: Evaluator, named: ast.Name, value: Any, frame: Frame, place: Place) -> None:
    """`x.requires_grad = value`."""
    owner = ev.name(named, frame, place.source)
    if isinstance(owner, Tensor):
        owner.grad = value is not False
    elif isinstance(owner, Term) and not ev.of_a_pair:
        assign(ev, named, tensors.owned(owner, place, grad=value is not False), frame, place.source)


def imported(ev: Evaluator, node: ast.Import | ast.ImportFrom, frame: Frame) -> None:
    for alias in node.names:
        name = alias.asname or alias.name.split(".")[0]
        path = alias.name if alias.asname else name
        if isinstance(node, ast.ImportFrom):
            path = f"{node.module or ''}.{alias.name}"
        frame.names[name] = constant(path)


def loop(ev: Evaluator, node: ast.For, frame: Frame, place: Place) -> None:
    over = ev.expression(node.iter, frame, place.source)
    for item in ev.items(over, Place(place.source, node.iter)):
        ev.step(place)
        assign(ev, node.target, item, frame, place.source)
        if body_ends(ev, node.body, frame, place.source):
            return
    run(ev, node.orelse, frame, place.source)


def body_ends(ev: Evaluator, body: Sequence[ast.stmt], frame: Frame, source: Source) -> bool:
    try:
        run(ev, body, frame, source)
    except Left as left:
        return left.ends
    return False


def assign(ev: Evaluator, target: ast.expr, value: Any, frame: Frame, source: Source) -> None:
    match target:
        case ast.Name(id=name):
            if ev.detaches and ev.of_a_pair:
                value = tensors.detached(value, Place(source, target))
            if isinstance(value, Term) and value.label is None:
                value.label = name
            if isinstance(value, Tensor) and value.name is None:
                value.name = name
            frame.names[name] = value
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            place = Place(source, target)
            if isinstance(value, Unknown):
                for element in elements:
                    assign(ev, element, value, frame, source)
                return
            items = list(ev.items(value, place))
            starred = [i for i, e in enumerate(elements) if isinstance(e, ast.Starred)]
            if starred and len(items) >= len(elements) - 1:
                first, last = starred[0], starred[0] + len(items) - len(elements) + 1
                items[first:last] = [items[first:last]]
            if len(items) != len(elements):
                message = f"{len(elements)} names are given {len(items)} values"
                place.refuse("bad-call", message, "give each name one value")
            for element, item in zip(elements, items, strict=True):
                inner = element.value if isinstance(element, ast.Starred) else element
                assign(ev, inner, item, frame, source)
        case ast.Subscript():
            owner = ev.expression(target.value, frame, source)
            place = Place(source, target)
            if isinstance(owner, list | dict):
                index = ev.expression(target.slice, frame, source)
                numbers.computed(lambda: owner.__setitem__(index, value), place)
            elif ev.of_a_pair or not isinstance(owner, Tensor | Unknown):
                place.refuse(
                    "not-in-language", "an element is assigned", "make a new value, with `torch.where`"
                )
