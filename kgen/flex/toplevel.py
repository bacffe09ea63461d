"""Reading of module statements in order.

If a statement cannot be read, the names that it could bind are unknown.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence

from kgen.diagnostics import KgenError
from kgen.flex import effects, scopes, statements
from kgen.flex.modules import Module
from kgen.flex.reader import Reader
from kgen.flex.source import Place
from kgen.flex.values import External, Unknown

MAX_LONG = 4
"""Number of statements that may take too long before the rest are skipped."""


def read(ev: Reader, module: Module) -> None:
    """Read the statements of a file."""
    with ev.reading(module):
        run(ev, module.tree.body, module)
    module.done = True


def run(ev: Reader, body: Sequence[ast.stmt], module: Module) -> bool:
    """Read statements. Return true if all of them could be read."""
    read = [_statement(ev, node, module) for node in body]
    return all(read)


def _statement(ev: Reader, node: ast.stmt, module: Module) -> bool:
    place = Place(module.source, node)
    short = isinstance(node, ast.FunctionDef | ast.Import | ast.ImportFrom)
    try:
        try:
            if not short and ev.too_long >= MAX_LONG:
                place.refuse(
                    "too-large",
                    "the statements before this one take too many steps",
                    "move it into a file of its own",
                )
            return _run(ev, node, module, place)
        except (RecursionError, statements.Left, statements.Returned):
            place.refuse(
                "too-deep", "the source nests too deep to be read", "split it into smaller parts"
            )
    except KgenError as error:
        if isinstance(node, ast.Assert) and error.diagnostics[0].code == "raises":
            raise  # Python cannot import the module either
        if ev.exhausted:
            ev.too_long += 1
            ev.steps = 0
        if not isinstance(node, ast.Raise):
            effects.lost(ev, node, module, error, place)
    return False


def _run(ev: Reader, node: ast.stmt, module: Module, place: Place) -> bool:
    match node:
        case ast.If():
            value = ev.expression(node.test, module, place.source)
            if statements.guards(node) and isinstance(value, statements.UNTOLD):
                statements.unchecked(ev, node, module, place)
                return False
            return run(
                ev, node.body if ev.decided(value, node.test, place.source) else node.orelse, module
            )
        case ast.With():
            with ev.gradients(statements.entered(ev, node, module, place)):
                return run(ev, node.body, module)
        case ast.Try():
            _attempt(ev, node, module, place)
            return run(ev, node.finalbody, module)
    statements.statement(ev, node, module, place)
    return True


def _attempt(ev: Reader, node: ast.Try, module: Module, place: Place) -> None:
    """Read `try`. If its body may raise, the executed parts are unknown."""
    if all(map(_cannot_raise, node.body)) and run(ev, node.body, module):
        made = scopes.bound(node.body).bound
        if not any(isinstance(module.names.get(name), Unknown) for name in made):
            run(ev, node.orelse, module)
            return
    # A name of another package either exists or raises.
    imports = [part for part in node.body if isinstance(part, ast.Import | ast.ImportFrom)]
    others = [*(part for part in node.body if part not in imports), *node.handlers, *node.orelse]
    elsewhere = scopes.bound(others).bound
    names = scopes.bound(imports).bound - elsewhere - set(module.names)
    hint = "bind the names outside of `try`"
    error = place.wrong("not-known", "the parts of this `try` that run are unknown", hint)
    whole = ast.copy_location(ast.Try(node.body, node.handlers, node.orelse, []), node)
    effects.lost(ev, whole, module, error, place)
    for part in imports:
        if all(alias.name != "*" for alias in part.names):
            module.bind(part, module)
    for name in scopes.bound(imports).bound - {"*"}:
        if name not in names or not isinstance(module.names[name], External):
            module.names[name] = Unknown(place, f"`{name}`", error=error)


def _cannot_raise(node: ast.stmt) -> bool:
    """True if a readable statement cannot raise in Python either."""
    match node:
        case ast.Import(names=names):
            return all(_always_there(alias.name) for alias in names)
        case ast.ImportFrom(module=str() as name, level=0):
            return _always_there(name)
        case ast.Assign(targets=targets, value=value):
            return all(isinstance(target, ast.Name) for target in targets) and _plain(value)
        case ast.AnnAssign(target=ast.Name(), value=ast.expr() as value):
            return _plain(value)
        case ast.FunctionDef(decorator_list=[], args=ast.arguments(defaults=[], kw_defaults=[])):
            return True
        case ast.Pass() | ast.Expr(value=ast.Constant()):
            return True
    return False


def _always_there(name: str) -> bool:
    first = name.partition(".")[0]
    return first == "torch" or first in sys.stdlib_module_names


def _plain(node: ast.expr) -> bool:
    """True for an expression of literals and names, whose evaluation cannot raise."""
    kinds = (
        *(
            ast.Constant,
            ast.Name,
            ast.UnaryOp,
            ast.BinOp,
            ast.Compare,
            ast.Tuple,
            ast.List,
            ast.IfExp,
        ),
        *(ast.BoolOp, ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context),
    )
    return all(isinstance(part, kinds) for part in ast.walk(node))
