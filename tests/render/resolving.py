"""Static check of templates: resolve every name against the annotations of the template's
dataclass.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from itertools import combinations
from typing import Any

from jinja2 import Environment, nodes

from kgen.targets.code import Code, Statement
from kgen.targets.template import Template, names_of

LOOP = {"index", "index0", "first", "last", "length", "previtem", "nextitem"}
TEXTS = (str, int, float, bool, Code, Statement, Template)
TEXT = str
"""Type of the result of a macro, a caller or a filter."""

Scope = dict[str, Any]


@dataclass
class Resolver:
    """Collect the problems of the names in a template, and the fields that it uses."""

    env: Environment
    problems: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    within: list[str] = field(default_factory=list)
    macros: dict[str, tuple[str, nodes.Macro]] = field(default_factory=dict)
    there: frozenset[str] = frozenset()
    """Names, also dotted ones, that an enclosing `if` has tested."""

    def resolve(self, cls: type[Template]) -> list[str]:
        """Return every problem of a dataclass and its template as `template:line: problem`."""
        root = fields_of(cls)
        self.template(cls.template, root)
        unused = sorted(own_names(cls) - self.used)
        return [
            *dict.fromkeys(self.problems),
            *(f"{cls.template}: never names `{name}`" for name in unused),
        ]

    def template(self, name: str, scope: Scope) -> None:
        assert self.env.loader is not None
        tree = self.env.parse(self.env.loader.get_source(self.env, name)[0])
        self.within.append(name)
        self._define(name, tree.body)
        self._body(tree.body, scope)
        self.within.pop()

    def _define(self, name: str, body: Sequence[nodes.Node]) -> None:
        """Collect the macros of a template and of its imports."""
        for node in body:
            if isinstance(node, nodes.Macro):
                self.macros[node.name] = name, node
            elif isinstance(node, nodes.FromImport | nodes.Import):
                assert isinstance(node.template, nodes.Const)
                assert self.env.loader is not None
                text = self.env.loader.get_source(self.env, node.template.value)[0]
                self._define(node.template.value, self.env.parse(text).body)

    def _body(self, body: Sequence[nodes.Node], scope: Scope) -> None:
        for node in body:
            self._node(node, scope)

    def _node(self, node: nodes.Node, scope: Scope) -> None:
        match node:
            case nodes.TemplateData() | nodes.Macro() | nodes.FromImport() | nodes.Import():
                pass
            case nodes.Output():
                for part in node.nodes:
                    if not isinstance(part, nodes.TemplateData):
                        self._printed(part, scope)
            case nodes.If():
                negated = isinstance(node.test, nodes.Not)
                test = node.test.node if isinstance(node.test, nodes.Not) else node.test
                self._type(test, scope)
                outside, inside = self.there, self.there | {_path(test)}
                for body, holds in (
                    (node.body, not negated),
                    (node.elif_, negated),
                    (node.else_, negated),
                ):
                    self.there = inside if holds else outside
                    self._body(body, scope)
                self.there = outside
            case nodes.For():
                self._for(node, scope)
            case nodes.Include():
                assert isinstance(node.template, nodes.Const)
                self.template(node.template.value, scope)
            case nodes.CallBlock():
                self._body(node.body, scope)
                self._call(node.call, scope)
            case nodes.FilterBlock() | nodes.Block():
                self._body(node.body, scope)
            case _:
                self._problem(node, f"{type(node).__name__} is not resolved")

    def _for(self, node: nodes.For, scope: Scope) -> None:
        of = self._type(node.iter, scope)
        element = None if of is None else element_of(of)
        if of is not None and element is None:
            self._problem(node, f"a loop over {_words(of)}")
        targets = node.target.items if isinstance(node.target, nodes.Tuple) else [node.target]
        types_of: Sequence[Any] = [element]
        if len(targets) > 1:
            types_of = typing.get_args(element)
            if element is not None and len(types_of) != len(targets):
                self._problem(node, f"{len(targets)} names for {_words(element)}")
            types_of = types_of if len(types_of) == len(targets) else [None] * len(targets)
        bound = {target.name: t for target, t in zip(targets, types_of, strict=True)}  # type: ignore[attr-defined]
        self._body(node.body, {**scope, **bound, "loop": LOOP})

    def _printed(self, node: nodes.Node, scope: Scope) -> None:
        found = self._type(node, scope)
        if found is not None and not printable(found):
            self._problem(node, f"prints {_words(found)}")

    def _type(self, node: nodes.Node, scope: Scope) -> Any:
        """Return the type of an expression, or None after recording a problem."""
        match node:
            case nodes.Const():
                return type(node.value)
            case nodes.Name():
                if node.name == "digest_of_code":
                    return TEXT
                if node.name not in scope:
                    return self._problem(node, f"there is no `{node.name}`")
                self.used.add(node.name)
                return self._narrowed(node, scope[node.name])
            case nodes.Getattr():
                return self._narrowed(node, self._attribute(node, self._type(node.node, scope)))
            case nodes.Filter():
                for part in (node.node, *node.args):
                    self._type(part, scope)
                return TEXT if node.name != "each" else list[str]
            case nodes.Call():
                self._call(node, scope)
                return TEXT
        return self._problem(node, f"{type(node).__name__} is not resolved")

    def _narrowed(self, node: nodes.Expr, of: Any) -> Any:
        """Return a type without None if an enclosing `if` has tested the expression."""
        if _path(node) not in self.there or of is None or of is LOOP:
            return of
        return typing.Union[_without_none(of)]  # noqa: UP007

    def _attribute(self, node: nodes.Getattr, of: Any) -> Any:
        if of is None:
            return None
        if of is LOOP:
            return (
                bool
                if node.attr in LOOP
                else self._problem(node, f"there is no `loop.{node.attr}`")
            )
        if type(None) in typing.get_args(of):
            return self._problem(node, f"`{_path(node.node)}` may be None here")
        found = [fields_of(one).get(node.attr) for one in _without_none(of) if _has_fields(one)]
        if len(found) != len(_without_none(of)) or None in found:
            return self._problem(node, f"{_words(of)} has no `{node.attr}`")
        return typing.Union[tuple(found)]  # noqa: UP007

    def _call(self, node: nodes.Call, scope: Scope) -> None:
        name = (
            node.node.attr
            if isinstance(node.node, nodes.Getattr)
            else getattr(node.node, "name", "")
        )
        given = [self._type(a, scope) for a in node.args]
        named = {a.key: self._type(a.value, scope) for a in node.kwargs}
        if name == "caller":
            return
        if name not in self.macros:
            self._problem(node, f"there is no macro `{name}`")
            return
        file, macro = self.macros[name]
        parameters = [a.name for a in macro.args]
        bound = dict(zip(parameters, given, strict=False)) | named
        if set(parameters[: len(parameters) - len(macro.defaults)]) - set(bound):
            self._problem(node, f"`{name}` is called without an argument")
        defaults = parameters[len(parameters) - len(macro.defaults) :]
        bound = {
            a: type(d.as_const()) for a, d in zip(defaults, macro.defaults, strict=True)
        } | bound
        self.within.append(file)
        self._body(macro.body, {**scope, **bound})
        self.within.pop()

    def _problem(self, node: nodes.Node, what: str) -> None:
        self.problems.append(f"{self.within[-1]}:{node.lineno}: {what}")


def _path(node: nodes.Node) -> str:
    """Return a name or a dotted name."""
    return (
        f"{_path(node.node)}.{node.attr}"
        if isinstance(node, nodes.Getattr)
        else getattr(node, "name", "")
    )


def own_names(cls: type[Template]) -> set[str]:
    """Return the names that a template defines itself, without inherited ones."""
    bases = (base for base in cls.__mro__ if "template" in vars(base) or base is cls)
    own = {name for base in bases for name in (*vars(base).get("__annotations__", ()), *vars(base))}
    return own & set(names_of(cls))


def conflicts(cls: type[Template]) -> Iterator[str]:
    """Yield each field with different types in two bases, unless one base inherits the other."""
    bases = [base for base in cls.__mro__ if is_dataclass(base)]
    own = {base: vars(base).get("__annotations__", {}) for base in bases}
    for (base, mine), (other, theirs) in combinations(own.items(), 2):
        for name in mine.keys() & theirs.keys() - {"template", "language"}:
            one, two = (typing.get_type_hints(of)[name] for of in (base, other))
            if one != two and not issubclass(base, other):
                first, second = (
                    f"{_words(one)} in {base.__name__}",
                    f"{_words(two)} in {other.__name__}",
                )
                yield f"`{name}` is {first}, and {second}"


def fields_of(cls: Any) -> Scope:
    """Return the types of the names that a template may use from a dataclass."""
    hints = typing.get_type_hints(cls)
    return {name: hints[name] if name in hints else _returned(cls, name) for name in names_of(cls)}


def _returned(cls: Any, name: str) -> Any:
    return typing.get_type_hints(getattr(cls, name).fget)["return"]


def _has_fields(of: Any) -> bool:
    return isinstance(of, type) and is_dataclass(of)


def _without_none(of: Any) -> tuple[Any, ...]:
    """Return the members of a union without None, or a tuple of the type itself."""
    if typing.get_origin(of) in (typing.Union, types.UnionType):
        return tuple(one for one in typing.get_args(of) if one is not type(None))
    return (of,)


def element_of(of: Any) -> Any:
    """Return the element type of a list or tuple; None for any other type."""
    found = []
    for one in _without_none(of):
        origin, args = typing.get_origin(one), typing.get_args(one)
        if origin is tuple and args[1:] != (Ellipsis,):
            return None
        if not (isinstance(origin, type) and issubclass(origin, Sequence)) or isinstance(
            one, type(Mapping)
        ):
            return None
        found.append(args[0])
    return typing.Union[tuple(found)]  # noqa: UP007


def printable(of: Any) -> bool:
    """True for text, numbers, trees, templates, and lists of them that stand on their own lines or
    use a filter.
    """
    for one in _without_none(of):
        element = one if isinstance(one, type) and issubclass(one, TEXTS) else element_of(one)
        if element is None or (element is not one and not printable(element)):
            return False
    return True


def _words(of: Any) -> str:
    return of.__name__ if isinstance(of, type) and typing.get_origin(of) is None else str(of)


def subclasses(cls: type[Template]) -> Iterator[type[Template]]:
    """Yield every dataclass with its own template."""
    for one in cls.__subclasses__():
        if "template" in vars(one):
            yield one
        yield from subclasses(one)
