"""Pass: exact derivatives of an expression with respect to a name or a buffer read.

Each distinct read of a buffer is a variable of its own. The gradient of the buffer is the sum over
its reads.

sympy differentiates and collects terms. The result may leave fp32, as the square of a divisor may.
Then the chain rule of the function table is used: for `a / b` it gives `(da - a / b * db) / b`,
which is in range where `a / b` is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy as sp

from kgen.expr.algebra import Algebra, call
from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, Const, Node, Read, Type, Var, children
from kgen.expr.softmax_form import with_scores

_ZERO, _ONE = Const(0, Type.INT), Const(1, Type.INT)


def derivative(node: Node, wrt: Var | Read, algebra: Algebra) -> Node:
    """Return d(node) / d(wrt); `Const(0)` if `node` does not depend on `wrt`."""
    written = chain_rule(node, wrt)
    if not algebra.takes(node):
        return written
    expr, target = algebra.to_sympy(node), algebra.to_sympy(wrt)
    stand_in = sp.Symbol("wrt", real=True)
    found = expr.xreplace({target: stand_in}).diff(stand_in).xreplace({stand_in: target})
    # Kernels also compute the value: if it overflows, its derivative may.
    return algebra.simplified(found, written, beside=node)


def differentiate(score_mod: Node, wrt: Var | Read, algebra: Algebra) -> Node:
    """Return d(score_mod) / d(wrt) as a tree over `qk`, with `score = scale * qk` substituted as in
    the forward loop.

    The result is `Const(0)` if `score_mod` does not depend on `wrt`.
    """
    return with_scores(derivative(score_mod, wrt, algebra))


def chain_rule(node: Node, wrt: Var | Read) -> Node:
    """Return d(node) / d(wrt) by the chain rule. Only zeros and ones are simplified."""
    known: dict[int, _Operand] = {}

    def of(part: Node) -> _Operand:
        if id(part) not in known:
            known[id(part)] = _Operand(_ONE) if part == wrt else _chained(part, of)
        return known[id(part)]

    return of(node).node


def _chained(node: Node, of: Callable[[Node], _Operand]) -> _Operand:
    if not isinstance(node, Call):
        return _Operand(_ZERO)
    args, value = [_Operand(a) for a in node.args], _Operand(node)
    changes = [of(a) for a in node.args]
    if all(is_zero(c.node) for c in changes):
        return _Operand(_ZERO)
    if node.fn == "where":
        return _applied("where", args[0], *changes[1:])
    if node.fn == "div":
        return (changes[0] - value * changes[1]) / args[1]
    if node.fn == "mul" and args[0] == args[1]:
        return args[0] * 2 * changes[0]
    row = TABLE[node.fn]
    total = _Operand(_ZERO)
    if row.derivative is None:
        return total
    for partial, change in zip(row.derivative(_applied, *args), changes, strict=True):
        if partial is not None:
            total = total + partial * change
    return total


@dataclass(frozen=True)
class _Operand:
    """A tree as an operand of the derivative rules. Minus signs move outwards."""

    node: Node

    def __add__(self, other: Any) -> _Operand:
        a, b = self.node, _tree(other)
        if is_zero(a) or is_zero(b):
            return _Operand(b if is_zero(a) else a)
        if _is_negated(b):
            return _Operand(call("sub", a, *children(b)))
        return _Operand(call("sub", b, *children(a)) if _is_negated(a) else call("add", a, b))

    def __sub__(self, other: Any) -> _Operand:
        return self + -_Operand(_tree(other))

    def __rsub__(self, other: Any) -> _Operand:
        return _Operand(_tree(other)) - self

    def __neg__(self) -> _Operand:
        if isinstance(self.node, Const):
            return _Operand(Const(-self.node.value, self.node.type))
        return (
            _Operand(*children(self.node))
            if _is_negated(self.node)
            else _Operand(call("neg", self.node))
        )

    def __mul__(self, other: Any) -> _Operand:
        a, b = self.node, _tree(other)
        if is_zero(a) or is_zero(b):
            return _Operand(_ZERO)
        if _is_negated(b) or _is_minus_one(b):
            return -(self * -_Operand(b))
        if _is_negated(a) or _is_minus_one(a):
            return -(-self * _Operand(b))
        return _Operand(b if is_one(a) else a if is_one(b) else call("mul", a, b))

    def __rmul__(self, other: Any) -> _Operand:
        return _Operand(_tree(other)) * self

    def __truediv__(self, other: Any) -> _Operand:
        a, b = self.node, _tree(other)
        if _is_negated(a):
            return -(-self / _Operand(b))
        return self if is_zero(a) or is_one(b) else _Operand(call("div", a, b))

    def __rtruediv__(self, other: Any) -> _Operand:
        return _Operand(_tree(other)) / self

    def __pow__(self, power: int) -> _Operand:
        return self if power == 1 else self ** (power - 1) * self


def _is_minus_one(node: Node) -> bool:
    return isinstance(node, Const) and node.value == -1


def _is_negated(node: Node) -> bool:
    return isinstance(node, Call) and node.fn == "neg"


def _applied(name: str, *args: Any) -> _Operand:
    return _Operand(call(name, *map(_tree, args)))


def _tree(value: Any) -> Node:
    if isinstance(value, _Operand):
        return value.node
    return Const(value, Type.INT if isinstance(value, int) else Type.FLOAT)


def is_one(node: Node) -> bool:
    """True for the constant 1."""
    return isinstance(node, Const) and node.value == 1


def is_zero(node: Node) -> bool:
    """True for the constant 0."""
    return isinstance(node, Const) and node.value == 0
