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
from typing import Any, NoReturn

from kgen.diagnostics import KgenError, did_you_mean, shown
from kgen.flex import (
    calls,
    changes,
    classes,
    comprehensions,
    effects,
    functions,
    modules,
    numbers,
    scopes,
    several,
    statements,
    tensors,
)
from kgen.flex.comparing import chain, known
from kgen.flex.operators import BINARY, UNARY
from kgen.flex.packages import PYTHON, constant
from kgen.flex.scopes import Symbols
from kgen.flex.source import Place, Source
from kgen.flex.values import (
    MISSING,
    UNBOUND,
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
    is_number,
    kind,
)

MAX_STEPS = 50_000
MAX_CALLS = 50


class Evaluator:
    """Reads one source, and the files of its package that it needs."""

    def __init__(self) -> None:
        self.steps = 0
        self.depth = 0
        self.of_a_pair = False
        """Whether a mod is being inlined: what is not a term or a number has no place there."""
        self.detaches = False
        """True inside a block of `torch.no_grad()`, whose operations have no gradient."""
        self.context: object = self
        """The source that is being read: a module, EXPR (this object), or a mod."""
        self.main: modules.Module | None = None
        self.made: dict[int, tuple[Any, object]] = {}
        """Lists and dictionaries by their identity, with the context that made them."""
        self.spoiled: dict[int, tuple[Any, Unknown]] = {}
        """Values that unread code may have changed."""
        self.learned: dict[int, tuple[Any, Tensor]] = {}
        """Tensors of one number that the source makes learn, by the identity of the number."""
        self.patched: dict[str, Unknown] = {}
        """Names of other packages that the source sets."""
        self.renamed = False
        """Set if the source sets attributes of functions."""
        self.symbols: dict[ast.AST, Symbols] = {}
        self.too_long = 0
        self.classes = classes
        self.notes: dict[str, None] = {}
        """What is assumed, for people."""
        self.unchecked: list[statements.Unchecked] = []
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
            module = self.loaded[key] = modules.load(path, self)
            self.main = self.main or module
            module.read()
        return self.loaded[key]

    @property
    def exhausted(self) -> bool:
        return self.steps > MAX_STEPS

    def step(self, place: Place) -> None:
        self.steps += 1
        if self.exhausted:
            message = f"reading the source takes more than {MAX_STEPS} steps"
            place.refuse("too-large", message, "write shorter loops, or put numbers into a tensor")

    @contextmanager
    def reading(self, context: object, of_a_pair: bool = False) -> Iterator[None]:
        """Read a module, even where a mod is what asks for it, or a mod: steps are counted for each."""
        before = self.context, self.of_a_pair, self.steps, self.depth
        self.context, self.of_a_pair, self.steps, self.depth = context, of_a_pair, 0, 0
        try:
            with self.gradients(True):
                yield
        finally:
            self.context, self.of_a_pair, self.steps, self.depth = before

    @contextmanager
    def gradients(self, enabled: bool) -> Iterator[None]:
        """As in `torch.set_grad_enabled(enabled)`."""
        before, self.detaches = self.detaches, not enabled
        try:
            yield
        finally:
            self.detaches = before

    # Changes ------------------------

    def own(self, value: Any) -> Any:
        """A list or a dictionary that is made here."""
        self.made.setdefault(id(value), (value, self.context))
        return value

    def learn(self, value: Any, grad: bool, place: Place) -> Any:
        """`value.requires_grad = grad`, under all names of the tensor."""
        match value:
            case Tensor():
                value.grad = grad
            case Term() if grad:
                made = tensors.owned(value, place, grad=True)
                made.name = value.label
                self.learned[id(value)] = value, made
                return made
        return value

    def changing(self, value: Any, place: Place) -> None:
        """Refuse to change what is older than the mod or the module that is read."""
        made = (
            value.context
            if isinstance(value, Frame | Class | Instance)
            else self.made.get(id(value), (None, None))[1]
        )
        if made is self.context or (self.context is self and made is self.main):
            return
        if self.of_a_pair:
            hint = "make a new value; PyTorch does not say how often it calls a mod"
            place.refuse("not-in-language", "a mod changes what outlives it", hint)
        hint = "bind the value where it is used"
        place.refuse("not-in-language", "what another file made is changed here", hint)

    def external(self, path: str) -> Any:
        """A name of another package."""
        return self.patched.get(path) or constant(path)

    def bind(self, node: ast.Import | ast.ImportFrom, frame: Frame, place: Place) -> None:
        """The names of an `import`."""
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

    # Expressions ------------------------

    def items(self, value: Any, place: Place) -> Iterable[Any]:
        """What a loop runs over."""
        if isinstance(value, Term | Part | Tensor | Method):
            return several.rows(value, place)
        if (held := getattr(value, "find_items", lambda place: None)(place)) is not None:
            return list(held)
        if isinstance(value, Unknown):
            self.untold(value)
        if isinstance(value, Passing):
            if value.used and value.once:
                place.refuse(
                    "not-in-language", "an iterator is used up here", "make a list of it, `list(...)`"
                )
            value.used = True
            return value.items
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
        if isinstance(value, Instance) and any(
            value.cls.find(name) is not MISSING for name in ("__bool__", "__len__")
        ):
            value = Unknown(Place(source, node), f"if {kind(value)} is true")
            self.untold(value)
        return (
            bool(value)
            if is_number(value) or isinstance(value, str | tuple | list | dict)
            else value is not None
        )

    def untold(self, value: Unknown) -> NoReturn:
        if value.error is not None:
            raise KgenError(value.error.diagnostics)
        message = f"{value.what} cannot be told without running the source"
        value.place.refuse("not-known", message, value.hint)

    def expression(self, node: ast.expr, frame: Scope, source: Source) -> Any:
        """What an expression stands for."""
        value = self._expression(node, frame, source)
        if id(value) in self.spoiled:
            return self.spoiled[id(value)][1]
        if id(value) in self.learned:
            return self.learned[id(value)][1]
        return self.own(value) if type(value) in (list, dict) else value

    def _expression(self, node: ast.expr, frame: Scope, source: Source) -> Any:
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
                operands = self.elements((node.left, node.right), frame, source)
                return self.operate(self.binary(node.op), tuple(operands), place)
            case ast.BoolOp(values=values):
                stops = isinstance(node.op, ast.Or)
                for part in values[:-1]:
                    value = self.expression(part, frame, source)
                    if self.decided(value, node, source) == stops:
                        return value
                return self.expression(values[-1], frame, source)
            case ast.Compare():
                return chain(self, node, frame, source)
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
                return self.defined(node, frame, place)
            case ast.NamedExpr(target=target):
                value = self.expression(node.value, frame, source)
                holder = scopes.around(frame)
                if isinstance(holder, Frame):
                    changes.assign(self, target, value, holder, source)
                return value
            case ast.Dict(keys=keys, values=values):
                names = self.elements([k for k in keys if k is not None], frame, source)
                if len(names) == len(keys) and all(isinstance(n, str | int | float | None) for n in names):
                    return dict(zip(names, self.elements(values, frame, source), strict=True))
            case ast.ListComp() | ast.GeneratorExp() | ast.DictComp():
                return comprehensions.listed(self, node, frame, source)
            case ast.JoinedStr(values=values):
                self.elements(values, frame, source)
                return Unknown(place, "this text")
            case ast.FormattedValue(value=value):
                return self.expression(value, frame, source)
            case ast.Slice():
                return slice(
                    *(p and self.expression(p, frame, source) for p in (node.lower, node.upper, node.step))
                )
        return effects.lost(self, node, frame, None, place)

    def binary(self, operator: ast.operator) -> str:
        """What an operator is called."""
        return BINARY.get(type(operator), "matmul")

    def name(self, node: ast.Name, scope: Scope, source: Source) -> Any:
        value = scope.find(node.id)
        place = Place(source, node)
        if value is UNBOUND:
            hint = "a name that a function binds is its own: give it a value first"
            place.refuse("unknown-name", f"{shown(node.id)} has no value here", hint)
        if value is not MISSING:
            return value
        if node.id in PYTHON:
            return self.external(f"builtins.{node.id}")
        if hasattr(builtins, node.id):
            place.refuse("not-in-language", f"`{node.id}` cannot be read", "use arithmetic, torch and math")
        module = scope.closure()
        while not isinstance(module, modules.Module) and hasattr(module, "outer"):
            module = module.outer.closure()
        known = list(module.names) if isinstance(module, modules.Module) else []
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

    def operate(self, fn: str, args: tuple[Any, ...], place: Place) -> Any:
        """An operator of Python on whatever its operands are."""
        args = tuple(int(a) if isinstance(a, Member) else a for a in args)
        if fn == "matmul":
            place.refuse("reduction", "`@` is a reduction", "the products of matrices are the kernel's")
        args, length = calls.of_lengths(self, fn, args, place)
        if length is not None:
            return length
        if any(isinstance(a, Unknown | DtypeOf) for a in args):
            first = next(known(a, place) for a in args if isinstance(a, Unknown | DtypeOf))
            if self.of_a_pair:
                self.untold(first)
            return first
        if any(isinstance(a, Class | Instance) for a in args):
            special = any(a.cls.find(f"__{fn}__") is not MISSING for a in args if isinstance(a, Instance))
            if fn not in ("eq", "ne") or special:
                word = next(kind(a) for a in args if isinstance(a, Class | Instance))
                place.refuse("bad-call", f"{word} is used as a number", "use its attributes")
            return (args[0] is args[1]) == (fn == "eq")
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
                value = owner.member(name)
                if value is MISSING:
                    place.refuse("unknown-name", f"the module has no {shown(name)}", "look at its names")
                return value
            case External(path=path):
                return self.external(f"{path}.{name}")
            case Term() | Part() | Tensor() if name == "data":
                return calls.method(self, Method(owner, "detach"), [], {}, place)
            case Term() | Part() | Tensor():
                return tensors.attribute(owner, name, place)
            case Function() if name == "__name__" and not self.renamed:
                return owner.name
            case Unknown():
                return owner.lost()
            case Class() | Instance() | Super() | Member() | Named():
                return classes.attribute(self, owner, name, place)
            case list() | dict() | str() | int() | float():
                return Method(owner, name)
        found = getattr(owner, "find_attribute", None)
        return found(name, place) if found else Unknown(place, f"`.{name}`")

    def subscript(self, node: ast.Subscript, scope: Scope, source: Source) -> Any:
        owner = self.expression(node.value, scope, source)
        return self.item(owner, self.expression(node.slice, scope, source), Place(source, node))

    def item(self, owner: Any, index: Any, place: Place) -> Any:
        """`owner[index]`."""
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
            case Class(members=dict()) if isinstance(index, str):
                return self.attribute(owner, index, place)
            case Term():
                place.refuse("bad-index", "one value of the pair is indexed", "index a tensor")
        if found := getattr(owner, "find_item", None):
            return found(index, place)
        what = owner.lost() if isinstance(owner, Unknown) else Unknown(place, "what stands here")
        return owner if isinstance(owner, External) else what

    # Calls ------------------------

    def called(self, node: ast.Call, scope: Scope, source: Source) -> Any:
        place = Place(source, node)
        callee = self.expression(node.func, scope, source)
        if callee == External("builtins.super") and not node.args:
            return classes.inherited(scope, place)
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
                return functions.inlined(self, callee, args, keywords, place)
            case Partial():
                return self.call(
                    callee.function, [*callee.args, *args], {**callee.keywords, **keywords}, place
                )
            case External():
                return calls.external(self, callee.path, list(args), dict(keywords), place)
            case Class() | Instance():
                return classes.called(self, callee, args, keywords, place)
            case Method(owner=Instance() as owner, name=name):
                return classes.method(self, owner, name, args, keywords, place)
            case Method():
                return calls.method(self, callee, list(args), dict(keywords), place)
            case Unknown() if not self.of_a_pair:
                effects.escaped(self, [*args, *keywords.values()], place)
                return callee.lost()
            case Unknown():
                self.untold(callee)
        what = tensors.called(callee) if isinstance(callee, Tensor) else kind(callee)
        place.refuse("bad-call", f"{what} is called, and is no function of the source", "call a function")

    def defined(self, node: ast.FunctionDef | ast.Lambda, scope: Scope, place: Place) -> Any:
        return functions.defined(self, node, scope, place)

    def deeper(self, work: Any, place: Place) -> Any:
        if self.depth >= MAX_CALLS:
            hint = "a function that calls itself must come to an end"
            place.refuse("too-deep", f"calls nest more than {MAX_CALLS} deep", hint)
        self.depth += 1
        try:
            return work()
        finally:
            self.depth -= 1

    def note(self, text: str) -> None:
        """Say what is assumed."""
        self.notes[text] = None
