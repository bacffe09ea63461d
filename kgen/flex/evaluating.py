"""The source, read with terms in the place of values: calls are inlined, and what a pair computes comes out.

Only syntax trees are walked. Control flow must be known from numbers of the source; what a pair decides by itself has
to be `torch.where`. Steps, calls and items are counted, so that no source takes long.
"""

from __future__ import annotations

import ast
import builtins
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kgen.diagnostics import did_you_mean, shown
from kgen.flex import calls, modules, numbers, statements, tensors
from kgen.flex.operators import BINARY, COMPARISONS, UNARY
from kgen.flex.packages import constant
from kgen.flex.source import Place, Source
from kgen.flex.statements import Returned
from kgen.flex.values import (
    MISSING,
    DtypeOf,
    External,
    Frame,
    Function,
    Method,
    Part,
    Partial,
    Scope,
    Tensor,
    Term,
    Unknown,
    is_callable,
    is_number,
    kind,
)

MAX_STEPS = 50_000
MAX_CALLS = 50

PYTHON = frozenset(
    {
        *("abs", "all", "any", "bool", "callable", "dict", "divmod", "enumerate", "float", "int"),
        *("isinstance", "len", "list", "map", "max", "min", "pow", "print", "range", "reversed"),
        *("round", "set", "sorted", "str", "sum", "tuple", "type", "zip"),
    }
)
"""The names of Python that need no import."""


class Evaluator:
    """Reads one source, and the files of its package that it needs."""

    def __init__(self) -> None:
        self.steps = 0
        self.depth = 0
        self.of_a_pair = False
        """Whether a mod is being inlined: what is not a term or a number has no place there."""
        self.detaches = 0
        """In how many blocks of `torch.no_grad()` it is, whose results have no gradient."""
        self.notes: dict[str, None] = {}
        """What is assumed, for people."""
        self.loaded: dict[Path, modules.Module] = {}

    def module(self, path: Path) -> modules.Module:
        """A file, read once."""
        key = Path(os.path.realpath(path))  # unlike `resolve`, it takes a loop of links
        if key not in self.loaded:
            if len(self.loaded) >= modules.MAX_MODULES:
                Place(Source(path.as_posix(), ""), ast.Pass()).refuse(
                    "too-large",
                    f"the source needs more than {modules.MAX_MODULES} files",
                    "import from fewer",
                )
            self.loaded[key] = modules.load(path, self)
        return self.loaded[key]

    def step(self, place: Place) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            message = f"reading the source takes more than {MAX_STEPS} steps"
            place.refuse("too-large", message, "write shorter loops, or put numbers into a tensor")

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """As in `torch.no_grad()`."""
        self.detaches += 1
        try:
            yield
        finally:
            self.detaches -= 1

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """What is computed ahead of the mods, once, even where a mod is what asks for it."""
        before, self.of_a_pair = self.of_a_pair, False
        try:
            yield
        finally:
            self.of_a_pair = before

    # Expressions ------------------------

    def items(self, value: Any, place: Place) -> Iterable[Any]:
        """What a loop runs over."""
        if isinstance(value, Term | Part | Tensor | Method):
            hint = "write its steps one by one; the number of steps must be known from the source"
            place.refuse("data-dependent", "a loop runs over a tensor", hint)
        if isinstance(value, Unknown):
            self.untold(value)
        if not isinstance(value, list | tuple | range | dict):
            place.refuse(
                "not-in-language", f"{kind(value)} cannot be looped over", "loop over a tuple, or a range"
            )
        return value

    def decided(self, value: Any, node: ast.expr, source: Source) -> bool:
        """Whether a condition of the control flow holds."""
        if isinstance(value, Term | Part):
            hint = "write `torch.where(condition, a, b)`, and `&`, `|`, `~` for `and`, `or`, `not`"
            Place(source, node).refuse("data-dependent", "a branch depends on the pair", hint)
        if isinstance(value, Tensor):
            hint = "decide with numbers of the source"
            Place(source, node).refuse("data-dependent", "a branch depends on what a tensor holds", hint)
        if isinstance(value, Method):
            value = Unknown(Place(source, node), f"`.{value.name}`")
        if isinstance(value, Unknown):
            self.untold(value)
        return (
            bool(value)
            if is_number(value) or isinstance(value, str | tuple | list | dict)
            else value is not None
        )

    def untold(self, value: Unknown) -> None:
        message = f"{value.what} cannot be told without running the source"
        value.place.refuse("not-known", message, value.hint)

    def expression(self, node: ast.expr, frame: Scope, source: Source) -> Any:
        """What an expression stands for."""
        place = Place(source, node)
        self.step(place)
        match node:
            case ast.Constant(value=value):
                if isinstance(value, bytes | complex) or value is Ellipsis:
                    return Unknown(place, "this literal")
                return value
            case ast.Name():
                return self.name(node, frame, source)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self.decided(self.expression(operand, frame, source), node, source)
            case ast.UnaryOp():
                return self.operate(
                    UNARY[type(node.op)], (self.expression(node.operand, frame, source),), place
                )
            case ast.BinOp():
                operands = (
                    self.expression(node.left, frame, source),
                    self.expression(node.right, frame, source),
                )
                return self.operate(self.binary(node.op), operands, place)
            case ast.BoolOp(values=values):
                stops = isinstance(node.op, ast.Or)
                for part in values[:-1]:
                    value = self.expression(part, frame, source)
                    if self.decided(value, node, source) == stops:
                        return value
                return self.expression(values[-1], frame, source)
            case ast.Compare():
                return self.comparison(node, frame, source)
            case ast.IfExp():
                test = self.decided(self.expression(node.test, frame, source), node.test, source)
                return self.expression(node.body if test else node.orelse, frame, source)
            case ast.Call():
                return self.called(node, frame, source)
            case ast.Attribute():
                return self.attribute(self.expression(node.value, frame, source), node.attr, place)
            case ast.Subscript():
                return self.subscript(node, frame, source)
            case ast.Tuple(elts=elements):
                return tuple(self.elements(elements, frame, source))
            case ast.List(elts=elements):
                return self.elements(elements, frame, source)
            case ast.Lambda():
                return self.function(node, frame, place)
            case ast.NamedExpr(target=target):
                value = self.expression(node.value, frame, source)
                if isinstance(frame, Frame):
                    statements.assign(self, target, value, frame, source)
                return value
            case ast.Dict(keys=keys, values=values) if all(isinstance(k, ast.Constant) for k in keys):
                names = [k.value for k in keys if isinstance(k, ast.Constant)]
                return dict(zip(names, self.elements(values, frame, source), strict=True))
            case ast.ListComp() | ast.GeneratorExp():
                return self.comprehension(node, frame, source)
            case ast.Slice():
                return slice(
                    *(p and self.expression(p, frame, source) for p in (node.lower, node.upper, node.step))
                )
        return Unknown(place, "what stands here")

    def binary(self, operator: ast.operator) -> str:
        """What an operator is called."""
        return BINARY.get(type(operator), "matmul")

    def name(self, node: ast.Name, scope: Scope, source: Source) -> Any:
        value = scope.find(node.id)
        if value is not MISSING:
            return value
        if node.id in PYTHON:
            return External(f"builtins.{node.id}")
        place = Place(source, node)
        if hasattr(builtins, node.id):
            place.refuse("not-in-language", f"`{node.id}` cannot be read", "use arithmetic, torch and math")
        module = scope.closure()
        while isinstance(module, Frame):
            module = module.outer.closure()
        known = list(module.bindings) if isinstance(module, modules.Module) else []
        hint = did_you_mean(node.id, known) or "define it in the source"
        place.refuse("unknown-name", f"{shown(node.id)} is not defined", hint)

    def elements(self, nodes: Sequence[ast.expr], scope: Scope, source: Source) -> list[Any]:
        found: list[Any] = []
        for node in nodes:
            place = Place(source, node)
            if isinstance(node, ast.Starred):
                over = self.expression(node.value, scope, source)
                for item in self.items(over, place):
                    self.step(place)
                    numbers.sized(found, 1, place).append(item)
            else:
                found.append(self.expression(node, scope, source))
        return found

    def comparison(self, node: ast.Compare, scope: Scope, source: Source) -> Any:
        operands = [self.expression(part, scope, source) for part in (node.left, *node.comparators)]
        links: list[Any] = []
        for operator, left, right in zip(node.ops, operands, operands[1:], strict=False):
            place = Place(source, node)
            match operator:
                case ast.Is() | ast.IsNot():
                    same = left is right
                    if is_number(left) or isinstance(left, External):
                        same = type(left) is type(right) and left == right
                    if isinstance(left, Unknown | DtypeOf):
                        links.append(_known(left, place))
                    else:
                        links.append(same == isinstance(operator, ast.Is))
                case ast.In() | ast.NotIn():
                    if isinstance(left, Term | Tensor | Part) or not isinstance(
                        right, tuple | list | dict | range
                    ):
                        hint = "compare with `==`, and join the cases with `|`"
                        place.refuse("data-dependent", "`in` depends on the pair", hint)
                    among = (left in right) == isinstance(operator, ast.In)
                    links.append(_known(left, place) if isinstance(left, Unknown | DtypeOf) else among)
                case _:
                    links.append(self.operate(COMPARISONS[type(operator)], (left, right), place))
        if len(links) > 1 and any(isinstance(link, Term) for link in links):
            hint = "write two comparisons joined with `&`"
            Place(source, node).refuse("data-dependent", "a chain of comparisons decides on the pair", hint)
        return next((link for link in links[:-1] if not link), links[-1])

    def comprehension(self, node: ast.ListComp | ast.GeneratorExp, scope: Scope, source: Source) -> list[Any]:
        found: list[Any] = []
        frame = Frame(scope)

        def each(generators: Sequence[ast.comprehension]) -> None:
            if not generators:
                place = Place(source, node)
                numbers.sized(found, 1, place).append(self.expression(node.elt, frame, source))
                return
            first, *rest = generators
            place = Place(source, first.iter)
            for item in self.items(self.expression(first.iter, frame, source), place):
                self.step(place)
                statements.assign(self, first.target, item, frame, source)
                if all(self.decided(self.expression(c, frame, source), c, source) for c in first.ifs):
                    each(rest)

        each(node.generators)
        return found

    def operate(self, fn: str, args: tuple[Any, ...], place: Place) -> Any:
        """An operator of Python on whatever its operands are."""
        if fn == "matmul":
            place.refuse("reduction", "`@` is a reduction", "the products of matrices are the kernel's")
        if any(isinstance(a, Unknown | DtypeOf) for a in args):
            first = next(_known(a, place) for a in args if isinstance(a, Unknown | DtypeOf))
            if self.of_a_pair:
                self.untold(first)
            return first
        if any(isinstance(a, Term | Part | Tensor) for a in args):
            return calls.applied(self, fn, args, place)
        if any(is_callable(a) for a in args) and fn not in ("eq", "ne"):
            word = next(kind(a) for a in args if is_callable(a))
            place.refuse("bad-call", f"{word} is used as a number", "call it")
        return numbers.apply(fn, args, place)

    def attribute(self, owner: Any, name: str, place: Place) -> Any:
        """`owner.name`."""
        match owner:
            case modules.Module():
                value = owner.find(name)
                if value is MISSING:
                    place.refuse("unknown-name", f"the module has no {shown(name)}", "look at its names")
                return value
            case External(path=path):
                return constant(f"{path}.{name}")
            case Term() | Part() | Tensor() if name == "data":
                return calls.method(self, Method(owner, "detach"), [], {}, place)
            case Term() | Part() | Tensor():
                return tensors.attribute(owner, name, place)
            case Function() if name == "__name__":
                return owner.name
            case Unknown():
                return Unknown(owner.place, owner.what)
            case list() | dict() | str():
                return Method(owner, name)
        found = getattr(owner, "find_attribute", None)
        return found(name, place) if found else Unknown(place, f"`.{name}`")

    def subscript(self, node: ast.Subscript, scope: Scope, source: Source) -> Any:
        owner = self.expression(node.value, scope, source)
        place = Place(source, node)
        index = self.expression(node.slice, scope, source)
        match owner:
            case Tensor() | Part():
                return tensors.indexed(self, owner, index if isinstance(index, tuple) else (index,), place)
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
                        "bad-index", "there is no such element", "look at the length of the sequence"
                    )
            case Term():
                place.refuse("bad-index", "one value of the pair is indexed", "index a tensor")
        return owner if isinstance(owner, Unknown | External) else Unknown(place, "what stands here")

    # Functions ------------------------

    def function(self, node: ast.FunctionDef | ast.Lambda, scope: Scope, place: Place) -> Any:
        given = node.args
        names = [a.arg for a in (*given.posonlyargs, *given.args)]
        last = names[len(names) - len(given.defaults) :]
        defaults = dict(zip(last, self.elements(given.defaults, scope, place.source), strict=True))
        for argument, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
            if value is not None:
                defaults[argument.arg] = self.expression(value, scope, place.source)
        made: Any = Function(node, place, scope.closure(), defaults)
        if isinstance(node, ast.FunctionDef):
            for decorator in reversed(node.decorator_list):
                value = self.expression(decorator, scope, place.source)
                made = calls.decorated(self, value, made, Place(place.source, decorator))
        return made

    def called(self, node: ast.Call, scope: Scope, source: Source) -> Any:
        place = Place(source, node)
        callee = self.expression(node.func, scope, source)
        args = self.elements(node.args, scope, source)
        keywords: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.expression(keyword.value, scope, source)
            if keyword.arg is not None:
                keywords[keyword.arg] = value
            elif isinstance(value, dict):
                keywords |= {str(name): item for name, item in value.items()}
            else:
                place.refuse(
                    "not-in-language", "arguments are unpacked from what is no dictionary", "write them out"
                )
        return self.call(callee, args, keywords, place)

    def call(self, callee: Any, args: Sequence[Any], keywords: Mapping[str, Any], place: Place) -> Any:
        """A call of whatever the callee is."""
        match callee:
            case Function():
                return self.inlined(callee, args, keywords, place)
            case Partial():
                return self.call(
                    callee.function, [*callee.args, *args], {**callee.keywords, **keywords}, place
                )
            case External():
                return calls.external(self, callee.path, list(args), dict(keywords), place)
            case Method():
                return calls.method(self, callee, list(args), dict(keywords), place)
            case Unknown() if not self.of_a_pair:
                return callee
            case Unknown():
                self.untold(callee)
        what = tensors.called(callee) if isinstance(callee, Tensor) else kind(callee)
        place.refuse("bad-call", f"{what} is called, and is no function of the source", "call a function")

    def inlined(self, f: Function, args: Sequence[Any], keywords: Mapping[str, Any], place: Place) -> Any:
        self.step(place)
        frame = Frame(f.scope, self.bound(f, args, keywords, place))
        if isinstance(f.node, ast.Lambda):
            return self.deeper(lambda: self.expression(f.node.body, frame, f.place.source), place)
        if any(isinstance(n, ast.Yield | ast.YieldFrom) for s in f.node.body for n in _own(s)):
            place.refuse("not-in-language", f"`{f.name}` is a generator", "return a value")

        def body() -> Any:
            assert isinstance(f.node, ast.FunctionDef)
            try:
                statements.run(self, f.node.body, frame, f.place.source)
            except Returned as returned:
                return returned.value
            return None

        return self.deeper(body, place)

    def deeper(self, work: Any, place: Place) -> Any:
        if self.depth >= MAX_CALLS:
            hint = "a function that calls itself must come to an end"
            place.refuse("too-deep", f"calls nest more than {MAX_CALLS} deep", hint)
        self.depth += 1
        try:
            return work()
        finally:
            self.depth -= 1

    def bound(
        self, f: Function, args: Sequence[Any], keywords: Mapping[str, Any], place: Place
    ) -> dict[str, Any]:
        """The arguments of a call under their names."""
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
                place.refuse("bad-call", f"`{f.name}` is given `{name}` twice", "give it once")
            if name not in known and given.kwarg is None:
                place.refuse("bad-call", f"`{f.name}` has no argument `{name}`", f"write `{signature(f)}`")
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
            values[given.kwarg.arg] = rest
        for name, value in values.items():
            if isinstance(value, Tensor) and value.name is None:
                value.name = name
        return values

    def note(self, text: str) -> None:
        """Say what is assumed."""
        self.notes[text] = None


def _known(value: Unknown | DtypeOf, place: Place) -> Unknown:
    """What cannot be told; the dtype of a value of the pair is the kernel's."""
    return value if isinstance(value, Unknown) else Unknown(place, "the dtype of a value", "leave it out")


def signature(f: Function) -> str:
    """How a function is called."""
    given = f.node.args
    names = [a.arg for a in (*given.posonlyargs, *given.args)]
    return f"{f.name}({', '.join(names)})"


def _own(node: ast.AST) -> Iterable[ast.AST]:
    """The nodes of a statement, without those of functions inside."""
    waiting = [node]
    while waiting:
        part = waiting.pop()
        yield part
        if not isinstance(part, ast.FunctionDef | ast.Lambda | ast.GeneratorExp):
            waiting += ast.iter_child_nodes(part)
