"""Conversion between trees and sympy expressions.

sympy sees `+ - * /`, integer powers and numbers. Everything else (`tanh`, `where`, comparisons,
buffer reads) is an opaque function of its arguments. So no rewrite of sympy changes the computed
value. sympy collects and cancels terms, and applies the chain rule with the derivatives of the
function table. An integer that may wrap is opaque where it becomes a real number. Printers never
receive sympy expressions.
"""

from __future__ import annotations

import math
import zlib
from functools import cache, reduce
from typing import Any

import sympy as sp

from kgen.expr.float_range import operations, stays_in_range
from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, Const, Node, Read, Type, Var, distinct, substitute
from kgen.expr.wrapping import may_wrap

# Scalars that are positive: sizes of non-empty tensors, the softmax scale, and log2(e).
_POSITIVE = frozenset({"B", "HQ", "HKV", "SQ", "SK", "scale", "LOG2E"})

MOST_OPERATIONS = 200
"""Largest size of an expression that sympy simplifies. A larger one takes seconds and gains
nothing.
"""
MOST_TERMS = 1000
"""Largest number of terms of an expanded polynomial. More take seconds and gain nothing."""

_INT32 = range(-(2**31), 2**31)

LOG2E = Var("LOG2E", Type.FLOAT)


@cache
def opaque(name: str) -> Any:
    """Return the sympy function for a row of the table. sympy knows only its derivative."""
    row = TABLE[name]

    def fdiff(self: Any, argindex: int = 1) -> Any:
        if row.derivative is None:
            return sp.Integer(0)
        partial = row.derivative(apply, *self.args)[argindex - 1]
        return sp.Integer(0) if partial is None else sp.sympify(partial)

    # With `is_number`, sympy would try to evaluate applications to numbers, and never succeed.
    members: dict[str, Any] = {"fdiff": fdiff, "is_number": False}
    if name == "where":
        members["_eval_derivative"] = _where_derivative
        members["eval"] = classmethod(lambda cls, c, a, b: a if a == b else None)
    return type(f"kgen_{name}", (sp.Function,), members)


def _where_derivative(self: Any, symbol: Any) -> Any:
    condition, a, b = self.args
    return apply("where", condition, a.diff(symbol), b.diff(symbol))


@cache
def _whole(node: Node) -> Any:
    """Return the sympy function for an integer that may wrap and becomes a real number.

    Its derivative is zero.
    """
    names = tuple(n for n in distinct(node) if isinstance(n, Var))
    members: dict[str, Any] = {"tree": node, "names": names, "is_number": False}
    members["fdiff"] = lambda self, argindex=1: sp.Integer(0)
    return type(f"whole_{zlib.crc32(repr(node).encode()):08x}", (sp.Function,), members)


def apply(name: str, *args: Any) -> Any:
    """Apply a row of the table to sympy operands. Derivative rules receive this function as `f`."""
    return opaque(name)(*(sp.sympify(a) for a in args))


def symbol(var: Var) -> Any:
    """Return the sympy symbol of a scalar with its assumptions."""
    return sp.Symbol(
        var.name,
        real=True,
        integer=var.type.integral or None,
        positive=var.name in _POSITIVE or None,
    )


class Algebra:
    """Conversion in both directions, which keeps the types of names.

    `positive` has the parameters with a value above zero.
    """

    def __init__(self, positive: frozenset[str] = frozenset()) -> None:
        self._types: dict[str, Type] = {}
        self._reads: dict[str, Type] = {}
        self._fractions: dict[str, Any] = {}
        self._expressions: dict[Node, Any] = {}
        self._positive = positive

    def symbol(self, var: Var) -> Any:
        """Return the symbol of a scalar."""
        self._types[var.name] = var.type
        if var.name in self._positive:
            return sp.Symbol(var.name, real=True, integer=var.type.integral or None, positive=True)
        return symbol(var)

    def slope(self, node: Node, var: Var) -> Any:
        """Return the slope of a value in a variable, as a sympy expression; None if the value is
        not linear in it.

        A step function has a constant derivative and is not linear.
        """
        value, x = self.to_sympy(node), self.symbol(var)
        slope = value.diff(x)
        linear = not slope.has(x) and vanishes(value - slope * x - value.subs(x, 0))
        return slope if linear else None

    def to_sympy(self, node: Node) -> Any:
        """Convert a tree to a sympy expression."""
        if node not in self._expressions:
            self._expressions[node] = self._to_sympy(node)
        return self._expressions[node]

    def _to_sympy(self, node: Node) -> Any:
        if isinstance(node, Const):
            return _number(node)
        if isinstance(node, Var):
            return self.symbol(node)
        if isinstance(node, Read):
            self._reads[node.buffer] = node.type
            return sp.Function(f"read_{node.buffer}")(*(self.to_sympy(i) for i in node.indices))
        args = [self._real(a) if node.type is Type.FLOAT else self.to_sympy(a) for a in node.args]
        match node.fn, args:
            case "float", [a] if node.args[0].type.integral and may_wrap(node.args[0]):
                return a
            case "add", [a, b]:
                return a + b
            case "sub", [a, b]:
                return a - b
            case "mul", [a, b]:
                return a * b
            case "div", [a, b] if b != 0:
                return a / b
            case "neg", [a]:
                return -a
        return opaque(node.fn)(*args)

    def _real(self, node: Node) -> Any:
        """Convert an operand of a function with a real result."""
        if not (node.type.integral and may_wrap(node)):
            return self.to_sympy(node)
        whole = _whole(node)
        return whole(*(self.symbol(v) for v in whole.names))

    def collected(self, expr: Any) -> Any:
        """Move common factors before sums, except factors of fractions.

        0.123 * x + 0.1 * y does not become 0.001 * (123 * x + 100 * y).
        """
        apart, functions = _without_functions(expr)
        named = {n: self._fraction(n) for n in apart.atoms(sp.Rational) if not n.is_Integer}
        return sp.factor_terms(apart.xreplace(named)).xreplace(functions)

    def _fraction(self, number: Any) -> Any:
        """Return a symbol for a fraction, as sympy distributes numbers over sums.

        `to_tree` restores the number.
        """
        name = repr(float(abs(number)))
        self._fractions[name] = abs(number)
        return sp.sign(number) * sp.Symbol(name, positive=True)

    def simplified(self, expr: Any, written: Node, beside: Node | None = None) -> Node:
        """Convert a sympy expression to a tree; return the equal tree `written` if only that is
        short or within fp32.

        Kernels compute `beside`, too: if it is out of range, the tree may be.
        """
        tree = self.to_tree(expr)
        # Expanded, the derivative of a product of n factors has n * n of them.
        if operations(tree) > 2 * operations(written):
            return written
        known = written if beside is None else call("add", written, beside)
        return tree if self.stays_in_range(tree, known) else written

    def takes(self, node: Node) -> bool:
        """True if an expression is small enough for sympy to simplify."""
        return operations(node) <= MOST_OPERATIONS

    def stays_in_range(self, rewritten: Node, written: Node) -> bool:
        """True if no intermediate of `rewritten` leaves fp32 or 32 bits unless one of `written`
        does.
        """
        return stays_in_range(rewritten, written, self._positive)

    def to_tree(self, expr: Any) -> Node:
        """Convert a sympy expression to a typed tree.

        Terms and factors have sympy's canonical order.
        """
        if expr.is_Number:
            return _constant(expr, self._wide())
        if expr.is_Symbol:
            if expr.name in self._fractions:
                return _constant(self._fractions[expr.name], False)
            if expr.name in ("True", "False"):
                return Const(expr.name == "True", Type.BOOL)
            return Var(expr.name, self._types.get(expr.name, Type.FLOAT))
        if expr.is_Add:
            return self._sum(expr)
        if expr.is_Mul or expr.is_Pow:
            return self._product(expr)
        name = type(expr).__name__
        if name.startswith("whole_"):
            names = dict(zip(expr.names, (self.to_tree(a) for a in expr.args), strict=True))
            return call("float", substitute(expr.tree, names))
        if name.startswith("read_"):
            buffer = name.removeprefix("read_")
            return Read(buffer, tuple(self.to_tree(a) for a in expr.args), self._reads[buffer])
        return call(name.removeprefix("kgen_"), *(self.to_tree(a) for a in expr.args))

    def _wide(self) -> bool:
        return Type.LONG in self._types.values() or Type.LONG in self._reads.values()

    def _sum(self, expr: Any) -> Node:
        # A sum cannot begin with a negative term: `b - a`, not `-a + b`.
        terms = sorted(expr.as_ordered_terms(), key=lambda t: bool(t.could_extract_minus_sign()))
        total = self.to_tree(terms[0])
        for term in terms[1:]:
            if term.could_extract_minus_sign():
                total = call("sub", total, self.to_tree(-term))
            else:
                total = call("add", total, self.to_tree(term))
        return total

    def _product(self, expr: Any) -> Node:
        # No common denominator: for 1.7 * x + 0.1, it would multiply the denominators to large
        # integers. The sum could then overflow where the written one does not.
        coefficient, rest = expr.as_coeff_Mul()
        upper: list[Any] = []
        lower: list[Any] = []
        for factor in rest.as_ordered_factors():
            base, power = factor.as_base_exp()
            (upper if power > 0 else lower).append(base ** abs(power))
        numerator = self._factors(coefficient, upper)
        return call("div", numerator, self._factors(sp.Integer(1), lower)) if lower else numerator

    def _factors(self, coefficient: Any, powers: list[Any]) -> Node:
        factors: list[Node] = []
        for factor in sp.Mul(*powers).as_ordered_factors() if powers else ():
            base, power = factor.as_base_exp()
            factors.append(_power(self.to_tree(base), int(power)))
        if coefficient == -1 and factors:
            return call("neg", reduce(lambda a, b: call("mul", a, b), factors))
        if coefficient != 1 or not factors:
            factors.insert(0, self.to_tree(coefficient))
        integers = [f for f in factors if f.type.integral]
        if 1 < len(integers) < len(factors) and may_wrap(
            reduce(lambda a, b: call("mul", a, b), integers)
        ):
            # multiply as real numbers from the first factor on
            factors.sort(key=lambda f: f.type.integral)
        return reduce(lambda a, b: call("mul", a, b), factors)


def expanded(expr: Any) -> Any | None:
    """Return the sum of products, `None` if it has more than `MOST_TERMS`.

    Arguments of functions stay as they are.
    """
    apart, functions = _without_functions(expr)
    return sp.expand(apart).xreplace(functions) if _terms(apart) <= MOST_TERMS else None


def vanishes(expr: Any) -> bool:
    """True if a value is zero everywhere."""
    return bool(expanded(expr) == 0)


def _without_functions(expr: Any) -> tuple[Any, dict[Any, Any]]:
    """Replace outermost applications of functions by symbols.

    Return the expression and functions by symbol.
    """
    symbols: dict[Any, Any] = {}

    def apart(part: Any) -> Any:
        if part.is_Function:
            return symbols.setdefault(
                part, sp.Symbol(f"#{len(symbols)}", real=part.is_real, positive=part.is_positive)
            )
        return part.func(*map(apart, part.args)) if part.args else part

    return apart(expr), {name: function for function, name in symbols.items()}


def _terms(expr: Any) -> int:
    """Return an upper bound of the number of terms after expansion."""
    counts = [_terms(a) for a in expr.args]
    if expr.is_Mul:
        return math.prod(counts)
    if expr.is_Pow:
        power = abs(int(expr.exp))
        return math.comb(counts[0] + power - 1, power)
    return sum(counts) if counts else 1


def _power(base: Node, power: int) -> Node:
    """Return a power as multiplications, by repeated squaring."""
    if power < 4:
        return reduce(lambda a, b: call("mul", a, b), [base] * power)
    half = _power(base, power // 2)
    square = call("mul", half, half)
    return call("mul", square, base) if power % 2 else square


def call(name: str, *args: Node) -> Call:
    """Apply a row of the table to trees. The row determines the type of the result."""
    return Call(name, args, TABLE[name].typed(tuple(a.type for a in args)))


def _constant(number: Any, wide: bool) -> Const:
    """Return a number as kernels have it: a float, or an integer that fits in 32 bits (64 with
    `wide`).
    """
    if number.is_Integer and (wide or int(number) in _INT32):
        return Const(int(number), Type.INT)
    return Const(float(number), Type.FLOAT)


def _number(node: Const) -> Any:
    if node.type is Type.BOOL:
        return sp.Symbol(str(node.value))
    if node.type is Type.INT:
        return sp.Integer(node.value)
    # The decimal as written, exactly: 0.1 is one tenth, so 10 * 0.1 cancels.
    return sp.Rational(repr(node.value))
