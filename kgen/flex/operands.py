"""Operands of composed functions: trees with Python operators."""

from __future__ import annotations

from typing import Any

from kgen.expr.nodes import Const, Node, Type
from kgen.flex.operations import Operations


class Functions:
    """Application of functions of the language to operands."""

    def __init__(self, operations: Operations) -> None:
        self.operations = operations

    def __call__(self, fn: str, *args: Any) -> Operand:
        low = self.operations
        nodes = [self.node(a) for a in args]
        match fn:
            case "where":
                return Operand(self, low._where(*nodes))
            case "and":
                return Operand(self, low._logical_and(*nodes))
            case "or":
                return Operand(self, low._logical_or(*nodes))
            case "not":
                return Operand(self, low._logical_not(*nodes))
        return Operand(self, low.call(fn, *map(low.numeric, nodes)))

    def where(self, condition: Any, a: Any, b: Any) -> Operand:
        return self("where", condition, a, b)

    def node(self, value: Any) -> Node:
        return value.node if isinstance(value, Operand) else self.operations.number(value)


class Operand:
    """A tree with Python operators."""

    def __init__(self, f: Functions, node: Node) -> None:
        self.f = f
        self.node = node

    @property
    def number(self) -> Any:
        """Return the value of a constant, or None."""
        return self.node.value if isinstance(self.node, Const) else None

    @property
    def integral(self) -> bool:
        return self.node.type is not Type.FLOAT

    def __add__(self, other: Any) -> Operand:
        return self.f("add", self, other)

    def __radd__(self, other: Any) -> Operand:
        return self.f("add", other, self)

    def __sub__(self, other: Any) -> Operand:
        return self.f("sub", self, other)

    def __rsub__(self, other: Any) -> Operand:
        return self.f("sub", other, self)

    def __mul__(self, other: Any) -> Operand:
        return self.f("mul", self, other)

    def __rmul__(self, other: Any) -> Operand:
        return self.f("mul", other, self)

    def __truediv__(self, other: Any) -> Operand:
        return self.f("div", self, other)

    def __rtruediv__(self, other: Any) -> Operand:
        return self.f("div", other, self)

    def __neg__(self) -> Operand:
        return self.f("neg", self)

    def __lt__(self, other: Any) -> Operand:
        return self.f("lt", self, other)

    def __le__(self, other: Any) -> Operand:
        return self.f("le", self, other)

    def __gt__(self, other: Any) -> Operand:
        return self.f("gt", self, other)

    def __ge__(self, other: Any) -> Operand:
        return self.f("ge", self, other)

    def is_(self, other: Any) -> Operand:
        """Return `self == other` as a tree. `__eq__` keeps Python's meaning."""
        low = self.f.operations
        return Operand(self.f, low.compared("eq", self.node, self.f.node(other)))

    def __and__(self, other: Any) -> Operand:
        return self.f("and", self, other)

    def __or__(self, other: Any) -> Operand:
        return self.f("or", self, other)

    def __invert__(self) -> Operand:
        return self.f("not", self)
