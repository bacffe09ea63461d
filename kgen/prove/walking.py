"""Walk through functions of an emitted Python file. A `Walker` fixes the meaning of values.

The walker executes assignments, branches, loops and calls of the file's own functions. Nothing of
the file is imported or run by Python.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kgen.prove.functions import Beyond

Env = dict[str, Any]

OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


@dataclass(frozen=True)
class Named:
    """A name that the file does not define, or an attribute of such a name: `tl.int64`."""

    path: str


@dataclass(frozen=True)
class Method:
    """An attribute of a value of the walker."""

    value: Any
    name: str


@dataclass(frozen=True)
class Returned:
    """The value of a `return` statement."""

    value: Any


@dataclass(frozen=True)
class File:
    """The functions and constants of an emitted file."""

    functions: Mapping[str, ast.FunctionDef]
    constants: Mapping[str, ast.expr]

    @staticmethod
    def of(text: str) -> File:
        """Parse a file."""
        body = ast.parse(text).body
        functions = {f.name: f for f in body if isinstance(f, ast.FunctionDef) and f.name != "_"}
        constants = {
            one.targets[0].id: one.value
            for one in body
            if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)
        }
        return File(functions, constants)


@dataclass
class Walker:
    """Executes functions of a file. Subclasses define the operations on their values."""

    file: File
    at: ast.AST = field(default_factory=lambda: ast.Constant(0))
    """The expression that is evaluated, for messages."""
    _constants: Env = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The source of the current expression."""
        return ast.unparse(self.at)

    def function(self, name: str, args: Env) -> Any:
        """Run a function of the file with values of its parameters."""
        result = self.block(self.file.functions[name].body, dict(args))
        return result.value if isinstance(result, Returned) else None

    # --- statements ------------------------

    def block(self, body: list[ast.stmt], env: Env) -> Returned | None:
        """Run statements until one returns."""
        for statement in body:
            if (result := self.statement(statement, env)) is not None:
                return result
        return None

    def statement(self, node: ast.stmt, env: Env) -> Returned | None:
        """Run one statement."""
        match node:
            case ast.Assign(targets=[target], value=value):
                self.assign(target, self.value(value, env), env)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.assign(target, self.value(value, env), env)
            case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=value):
                both = ast.copy_location(ast.BinOp(ast.Name(name, ast.Load()), op, value), node)
                self.assign(target, self.value(both, env), env)
            case ast.Expr(value=ast.Constant()):
                pass
            case ast.Expr(value=value):
                self.value(value, env)
            case ast.Return(value=None):
                return Returned(None)
            case ast.Return(value=ast.expr() as value):
                return Returned(self.value(value, env))
            case ast.With(body=body):
                return self.block(body, env)
            case ast.If():
                return self.choose(node, env)
            case ast.For(target=ast.Name() as target, iter=over, body=body):
                for element in self.loop(self.value(over, env), node, env):
                    env[target.id] = element
                    self.block(body, env)
            case _:
                raise Beyond(ast.unparse(node))
        return None

    def assign(self, target: ast.expr, value: Any, env: Env) -> None:
        """Assign a value to a name, or a tuple to several names."""
        if isinstance(target, ast.Name):
            env[target.id] = value
        elif isinstance(target, ast.Tuple):
            for one, part in zip(target.elts, tuple(value), strict=True):
                self.assign(one, part, env)
        else:
            raise Beyond(ast.unparse(target))

    def choose(self, node: ast.If, env: Env) -> Returned | None:
        """Run a branch of an `if` whose condition is known."""
        test = self.value(node.test, env)
        if not isinstance(test, bool | int):
            raise Beyond(ast.unparse(node.test))
        return self.block(node.body if test else node.orelse, env)

    def loop(self, over: Any, node: ast.For, env: Env) -> Iterator[Any]:
        """Yield the elements over which a loop runs."""
        yield from over

    # --- expressions ------------------------

    def value(self, node: ast.expr, env: Env) -> Any:
        """Return the value of an expression."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return env[name] if name in env else self.constant(name)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return tuple(self._parts(parts, env))
            case ast.IfExp(test=test, body=body, orelse=other):
                return self.value(body if self.value(test, env) else other, env)
            case ast.BoolOp(op=op, values=parts):
                return self.both([self.value(part, env) for part in parts], op)
            case ast.Slice(lower=lower, upper=upper):
                ends = (None if end is None else self.value(end, env) for end in (lower, upper))
                return slice(*ends)
        return self._operation(node, env)

    def _operation(self, node: ast.expr, env: Env) -> Any:
        match node:
            case ast.Attribute(value=inner, attr=name):
                return self.attribute(self.value(inner, env), name)
            case ast.Subscript(value=inner, slice=index):
                return self.element(self.value(inner, env), self.value(index, env))
            case ast.BinOp(left=left, op=op, right=right):
                sides = self.value(left, env), self.value(right, env)
                self.at = node
                return self.binary(type(op), *sides)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return self.negative(self.value(inner, env))
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                if isinstance(value := self.value(inner, env), bool):
                    return not value
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self.binary(type(op), self.value(left, env), self.value(right, env))
            case ast.Call(func=function, args=args, keywords=keywords):
                called = self.value(function, env)
                values = self._parts(args, env)
                named: Env = {}
                for keyword in keywords:
                    value = self.value(keyword.value, env)
                    named |= {keyword.arg: value} if keyword.arg else value
                self.at = node
                return self.call(called, values, named)
        raise Beyond(ast.unparse(node))

    def _parts(self, nodes: list[ast.expr], env: Env) -> list[Any]:
        found: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                found += self.value(node.value, env)
            else:
                found.append(self.value(node, env))
        return found

    def constant(self, name: str) -> Any:
        """Return the value of a constant of the file, or a `Named`."""
        if name in self.file.constants and name not in self._constants:
            try:
                self._constants[name] = self.value(self.file.constants[name], {})
            except Beyond:  # an object that only the runtime has
                self._constants[name] = Named(name)
        return self._constants.get(name, Named(name))

    def arguments(self, name: str, args: list[Any], named: Env) -> Env:
        """Return the values of the parameters of a function of the file in a call."""
        of = self.file.functions[name].args
        parameters = [*of.posonlyargs, *of.args, *of.kwonlyargs]
        return {p.arg: a for p, a in zip(parameters, args, strict=False)} | named

    # --- operations that subclasses extend ------------------------

    def both(self, values: list[Any], op: ast.boolop) -> Any:
        """Return the conjunction or disjunction of values, of which one may be unknown."""
        decides = isinstance(op, ast.Or)
        known = [value for value in values if isinstance(value, bool | int)]
        if any(bool(value) is decides for value in known):
            return decides
        unknown = [value for value in values if not isinstance(value, bool | int)]
        if len(unknown) > 1:
            raise Beyond(self.text)
        return unknown[0] if unknown else not decides

    def attribute(self, value: Any, name: str) -> Any:
        """Return an attribute of a value."""
        return Named(f"{value.path}.{name}") if isinstance(value, Named) else Method(value, name)

    def element(self, value: Any, index: Any) -> Any:
        """Return an element of a tuple or dictionary."""
        return value[index]

    def binary(self, op: type[ast.AST], a: Any, b: Any) -> Any:
        """Return the result of an operation on two values."""
        return OPERATORS[op](a, b)

    def negative(self, value: Any) -> Any:
        """Return the negation of a value."""
        return -value

    def call(self, called: Any, args: list[Any], named: Env) -> Any:
        """Return the result of a call."""
        if isinstance(called, Named):
            if called.path in self.file.functions:
                return self.function(called.path, self.arguments(called.path, args, named))
            if called.path == "dict":
                return named
            if called.path in ("tl.constexpr", "float", "int"):
                return float(args[0]) if called.path == "float" else args[0]
        raise Beyond(self.text)
