"""Execution of statements of the source. Control flow may depend only on numbers of the source."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

from kgen.diagnostics import KgenError, escaped
from kgen.flex import changes, matching
from kgen.flex.changes import assign, put
from kgen.flex.reader import Reader, Unchecked
from kgen.flex.source import Place, Source
from kgen.flex.tables import GRADIENT_MODES, NO_GRAD
from kgen.flex.values import External, Frame, Method, Part, Passing, Tensor, Term, Unknown


class Returned(Exception):
    """Signal of `return`, with the value."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Left(Exception):
    """Signal of `break` or `continue`."""

    def __init__(self, ends: bool) -> None:
        self.ends = ends


def run(ev: Reader, body: Sequence[ast.stmt], frame: Frame, source: Source) -> None:
    """Run statements in order. They bind names in the frame."""
    for node in body:
        statement(ev, node, frame, Place(source, node))


def statement(ev: Reader, node: ast.stmt, frame: Frame, place: Place) -> None:
    """Run one statement. Refuse a statement that cannot be read."""
    ev.step(place)
    run_it = _RUN.get(type(node))
    if run_it is None:
        word = type(node).__name__.lower()
        place.refuse(
            "not-in-language", f"the statement `{word}` cannot be read", "write it in another way"
        )
    run_it(ev, node, frame, place)


UNTOLD = Unknown | Tensor | Part | Term | Method
"""Values for which a check of arguments is assumed to pass."""


def guards(node: ast.If) -> bool:
    """True if an `if` only raises."""
    return not node.orelse and all(isinstance(statement, ast.Raise) for statement in node.body)


def checked(ev: Reader, node: ast.Assert, frame: Frame, place: Place) -> None:
    """Run `assert`. Refuse it if it fails. If its outcome is unknown, add a note."""
    try:
        test = ev.expression(node.test, frame, place.source)
    except KgenError:
        if not ev.of_a_pair:
            raise
        # a mod may assert conditions that are not in the language
        unchecked(ev, node, frame, place)
        return
    if isinstance(test, UNTOLD):
        unchecked(ev, node, frame, place)
    elif not test:
        message = f"an assertion of the source fails here{_message(node.msg)}"
        place.refuse("raises", message, "pass arguments that satisfy the check")


def unchecked(ev: Reader, node: ast.Assert | ast.If, frame: Frame, place: Place) -> None:
    """Add a note that a check is left out."""
    names = [part.id for part in ast.walk(node.test) if isinstance(part, ast.Name)]
    values = [frame.find(name) for name in names]
    tensors = tuple(
        v.tensor if isinstance(v, Part) else v for v in values if isinstance(v, Part | Tensor)
    )
    test = ast.unparse(node.test)
    said = f"`{test[:80]}{'...' * (len(test) > 80)}`"
    says = f"asserts {said}" if isinstance(node, ast.Assert) else f"raises if {said}"
    where = f"line {place.line} of {PurePath(place.source.name).name}"
    note = f"not checked in kernels: {where} {says}"
    ev.unchecked.append(Unchecked(note, tensors, ev.of_a_pair or ev.context is ev))


def _argument(node: ast.expr | None) -> ast.expr | None:
    """Return the first argument of a raised exception."""
    return node.args[0] if isinstance(node, ast.Call) and node.args else None


def _message(node: ast.expr | None) -> str:
    """Return the message of the source if it is a literal."""
    known = isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value
    return f": {escaped(node.value)[:120]}" if known else ""  # type: ignore[union-attr]


def entered(ev: Reader, node: ast.With, frame: Frame, place: Place) -> bool:
    """Enter the context managers of `with`: supported ones of torch, which bind no name and catch
    no exception.

    Return true if operations have gradients inside.
    """
    gradients = not ev.detaches
    for item in node.items:
        call = item.context_expr
        func = ev.expression(call.func, frame, place.source) if isinstance(call, ast.Call) else None
        path = func.path if isinstance(func, External) else ""
        if path.partition(".")[0] not in ("torch", "warnings") and path != "contextlib.nullcontext":
            at = Place(place.source, call)
            at.refuse("not-in-language", "the effect of this `with` is unknown", "leave it out")
        if isinstance(call, ast.Call) and path.rpartition(".")[2] in GRADIENT_MODES:
            gradients = _gradients(ev, path, call, frame, place, gradients)
        else:
            ev.expression(call, frame, place.source)
        if item.optional_vars is not None:
            unknown = Unknown(place, "the value of `with`")
            assign(ev, item.optional_vars, unknown, frame, place.source)
    return gradients


def _gradients(
    ev: Reader, path: str, call: ast.Call, frame: Frame, place: Place, before: bool
) -> bool:
    """Return true if operations have gradients inside a context manager."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    mode = ev.expression(given[0], frame, place.source) if given else True
    if not isinstance(mode, bool):
        if not ev.of_a_pair:
            return before
        message = "the gradient mode here is unknown"
        raise Place(place.source, call).wrong("not-known", message, "write `True` or `False`")
    return mode != (path.rpartition(".")[2] in NO_GRAD)


def loop(ev: Reader, node: ast.For, frame: Frame, place: Place) -> None:
    over = ev.expression(node.iter, frame, place.source)
    at = Place(place.source, node.iter)
    running = over.of if isinstance(over, Passing) else Passing([], of=[over]).of
    for item in list(over) if isinstance(over, list | dict) else ev.items(over, at):
        ev.step(place)
        assign(ev, node.target, item, frame, place.source)
        if body_ends(ev, node.body, frame, place.source):
            return
        if not all(same(now, before) for now, before in running):
            at.refuse(
                "not-in-language",
                "the loop changes the sequence that it runs over",
                "loop over a copy: `list(...)`",
            )
    run(ev, node.orelse, frame, place.source)


def same(over: list[Any] | dict[Any, Any], before: list[Any]) -> bool:
    """True if a sequence still has the items `before`."""
    return len(over) == len(before) and all(a is b for a, b in zip(over, before, strict=True))


def body_ends(ev: Reader, body: Sequence[ast.stmt], frame: Frame, source: Source) -> bool:
    try:
        run(ev, body, frame, source)
    except Left as left:
        return left.ends
    return False


# --- one kind of statement each ------------------------


def _return(ev: Reader, node: ast.Return, frame: Frame, place: Place) -> None:
    raise Returned(ev.expression(node.value, frame, place.source) if node.value else None)


def _assign(ev: Reader, node: ast.Assign, frame: Frame, place: Place) -> None:
    value = ev.expression(node.value, frame, place.source)
    for target in node.targets:
        assign(ev, target, value, frame, place.source)


def _annotated(ev: Reader, node: ast.AnnAssign, frame: Frame, place: Place) -> None:
    if node.value is not None:
        assign(ev, node.target, ev.expression(node.value, frame, place.source), frame, place.source)


def _define(ev: Reader, node: ast.FunctionDef | ast.ClassDef, frame: Frame, place: Place) -> None:
    put(ev, frame, node.name, ev.defined(node, frame, place), place)


def _if(ev: Reader, node: ast.If, frame: Frame, place: Place) -> None:
    value = ev.expression(node.test, frame, place.source)
    if guards(node) and not ev.of_a_pair and isinstance(value, UNTOLD):
        unchecked(ev, node, frame, place)
        return
    test = ev.decided(value, node.test, place.source)
    run(ev, node.body if test else node.orelse, frame, place.source)


def _while(ev: Reader, node: ast.While, frame: Frame, place: Place) -> None:
    while ev.decided(ev.expression(node.test, frame, place.source), node.test, place.source):
        ev.step(place)
        if body_ends(ev, node.body, frame, place.source):
            return
    run(ev, node.orelse, frame, place.source)


def _leave(ev: Reader, node: ast.Break | ast.Continue, frame: Frame, place: Place) -> None:
    raise Left(isinstance(node, ast.Break))


def _evaluate(ev: Reader, node: ast.Expr, frame: Frame, place: Place) -> None:
    if not isinstance(node.value, ast.Constant):
        ev.expression(node.value, frame, place.source)


def _with(ev: Reader, node: ast.With, frame: Frame, place: Place) -> None:
    with ev.gradients(entered(ev, node, frame, place)):
        run(ev, node.body, frame, place.source)


def _delete(ev: Reader, node: ast.Delete, frame: Frame, place: Place) -> None:
    for target in node.targets:
        changes.delete(ev, target, frame, place.source)


def _match(ev: Reader, node: ast.Match, frame: Frame, place: Place) -> None:
    value = ev.expression(node.subject, frame, place.source)
    for case in node.cases:
        if matching.holds(ev, value, case, frame, place.source):
            run(ev, case.body, frame, place.source)
            break


def _raise(ev: Reader, node: ast.Raise, frame: Frame, place: Place) -> None:
    message = f"the source raises an exception here{_message(_argument(node.exc))}"
    place.refuse("raises", message, "pass arguments that satisfy the check")


def _import(ev: Reader, node: ast.Import | ast.ImportFrom, frame: Frame, place: Place) -> None:
    ev.bind(node, frame, place)


def _nothing(ev: Reader, node: ast.stmt, frame: Frame, place: Place) -> None:
    pass


_RUN: dict[type[ast.stmt], Callable[[Reader, Any, Frame, Place], None]] = {
    ast.Return: _return,
    ast.Assign: _assign,
    ast.AnnAssign: _annotated,
    ast.AugAssign: changes.update,
    ast.FunctionDef: _define,
    ast.ClassDef: _define,
    ast.If: _if,
    ast.For: loop,
    ast.While: _while,
    ast.Break: _leave,
    ast.Continue: _leave,
    ast.Expr: _evaluate,
    ast.Assert: checked,
    ast.Import: _import,
    ast.ImportFrom: _import,
    ast.With: _with,
    ast.Delete: _delete,
    ast.Match: _match,
    ast.Raise: _raise,
    ast.Pass: _nothing,
    ast.Global: _nothing,
    ast.Nonlocal: _nothing,
}
"""The function that runs each kind of statement. Other kinds are refused."""
