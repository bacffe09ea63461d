"""Evaluator of the text of an expression at many points, independent of kgen's parser, table and
evaluator.

NumPy evaluates Python's syntax tree. Integers have 64 bits and wrap to 32 as in kernels; reals are
float64. Each value records where it is meaningful. It is not if
- an integer that wrapped is compared, divided or used as an index
- a number is divided by zero, or an integer is shifted by more bits than it has
- rounding may decide a comparison or a step

Values that a condition does not select are ignored.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

EPSILON = 1e-11
"""Relative error of an operation on reals: far above the rounding of float64, to allow sums in
another order.
"""
_WRAPS = 2**31


@dataclass(frozen=True)
class Value:
    """Numbers or truth values by point.

    | field | meaning |
    |---|---|
    | `ok` | the value is meaningful |
    | `wrapped` | an integer exceeded 32 bits in the computation |
    | `error` | bound on the difference from another order of operations |
    | `exact` | no operation rounded |
    """

    it: Any
    ok: Any = True
    wrapped: Any = False
    error: Any = 0.0
    exact: bool = True
    wide: bool = False
    """True for a 64-bit integer."""

    @property
    def real(self) -> bool:
        """True for a real number."""
        return bool(self.it.dtype == np.float64)

    @property
    def whole(self) -> bool:
        """True for an integer."""
        return bool(self.it.dtype == np.int64)

    def as_real(self) -> Value:
        """Convert to a real number. The result is meaningful even if the integer wrapped."""
        if self.real:
            return self
        return Value(self.it.astype(np.float64), self.ok, error=np.float64(0), exact=True)

    def used(self) -> Any:
        """True at points where an integer may be compared, divided, or used as an index."""
        return self.ok & ~np.asarray(self.wrapped)


def text_value(text: str, env: Mapping[str, Any], narrow: frozenset[str] = frozenset()) -> Value:
    """Evaluate a text.

    `env` maps each scalar to a number or an array by point, and each buffer to an array. Buffers in
    `narrow` have 32-bit elements.
    """
    *lines, last = ast.parse(text).body
    walker = _Walker({**env}, narrow)
    for line in lines:
        assert isinstance(line, ast.Assign)
        assert isinstance(line.targets[0], ast.Name)
        walker.names[line.targets[0].id] = walker.value(line.value)
    assert isinstance(last, ast.Expr)
    with np.errstate(all="ignore"):
        return walker.value(last.value)


class _Walker:
    def __init__(self, env: dict[str, Any], narrow: frozenset[str]) -> None:
        self.env = env
        self.narrow = narrow
        self.names: dict[str, Value] = {}

    def value(self, node: ast.expr) -> Value:
        match node:
            case ast.Constant(value):
                return _number(value)
            case ast.Name(name):
                return self.named(name)
            case ast.UnaryOp(op, operand):
                return _UNARY[type(op)](self.value(operand))
            case ast.BinOp(base, ast.Pow(), ast.Constant(int(power))):
                return reduce(_multiplied, [self.value(base)] * power)
            case ast.BinOp(left, op, right):
                return _binary(type(op), self.value(left), self.value(right))
            case ast.BoolOp(op, values):
                join = _both if isinstance(op, ast.And) else _either
                return reduce(join, map(self.value, values))
            case ast.Compare(left, ops, comparators):
                values = [self.value(part) for part in (left, *comparators)]
                links = [
                    _compared(type(op), a, b)
                    for op, a, b in zip(ops, values, values[1:], strict=False)
                ]
                return reduce(_both, links)
            case ast.IfExp(test, body, orelse):
                return _chosen(*map(self.value, (test, body, orelse)))
            case ast.Call(ast.Name(name), args):
                return _called(name, [self.value(a) for a in args])
            case ast.Subscript(ast.Name(name), index):
                at = index.elts if isinstance(index, ast.Tuple) else [index]
                return self.read(name, [_index(self.value(i)) for i in at])
        raise NotImplementedError(ast.dump(node))

    def named(self, name: str) -> Value:
        if name == "inf":
            return Value(np.float64(math.inf), exact=True)
        if name not in self.names:
            found = np.asarray(self.env[name])
            self.names[name] = Value(found, exact=name != "score")
        return self.names[name]

    def read(self, name: str, at: list[Value]) -> Value:
        """Return an element of a buffer, or zero out of bounds."""
        buffer = self.env[name]
        inside: Any = True
        for index, size in zip(at, buffer.shape, strict=True):
            inside = inside & (index.it >= 0) & (index.it < size)
        if not buffer.size:
            found = np.zeros((), buffer.dtype)
        else:
            places = [np.clip(i.it, 0, size - 1) for i, size in zip(at, buffer.shape, strict=True)]
            found = np.where(inside, buffer[tuple(places)], np.zeros((), buffer.dtype))
        ok = reduce(lambda a, b: a & b, [i.used() for i in at])
        return Value(found, ok, wide=found.dtype == np.int64 and name not in self.narrow)


def _number(value: Any) -> Value:
    if isinstance(value, bool):
        return Value(np.bool_(value))
    if isinstance(value, int):
        return Value(np.int64(value))
    return Value(np.float64(value), exact=float(value * 1024).is_integer())


def _wrap(it: Any, *parts: Value) -> Value:
    """Return the integer result of an operation on integers."""
    ok = reduce(lambda a, b: a & b, [p.ok for p in parts])
    flags = reduce(lambda a, b: a | b, [p.wrapped for p in parts])
    wide = any(p.wide for p in parts)
    if wide:
        return Value(it, ok & (np.abs(it) < 2**60), flags, wide=True)
    short = (it + _WRAPS) % (2 * _WRAPS) - _WRAPS
    return Value(short, ok, flags | (short != it))


def _made(it: Any, error: Any, *parts: Value) -> Value:
    """Return the real result of an operation on reals."""
    ok = reduce(lambda a, b: a & b, [p.ok for p in parts])
    exact = all(p.exact for p in parts)
    size = np.abs(it)
    return Value(it, ok, error=error + EPSILON * np.where(np.isfinite(size), size, 0), exact=exact)


def _binary(op: type, a: Value, b: Value) -> Value:
    if op in _BITS:
        return _bits(op, a, b)
    if op in (ast.FloorDiv, ast.Mod):
        return _divided(op, a, b)
    if op is ast.Div:
        return _quotient(a.as_real(), b.as_real())
    if op is ast.Mult:
        return _multiplied(a, b)
    sign = 1 if op is ast.Add else -1
    if a.whole and b.whole:
        return _wrap(a.it + sign * b.it, a, b)
    a, b = a.as_real(), b.as_real()
    return _made(a.it + sign * b.it, a.error + b.error, a, b)


def _multiplied(a: Value, b: Value) -> Value:
    if a.whole and b.whole:
        return _wrap(a.it * b.it, a, b)
    a, b = a.as_real(), b.as_real()
    error = _finite(np.abs(a.it) * b.error) + _finite(np.abs(b.it) * a.error)
    return _made(a.it * b.it, error, a, b)


def _finite(x: Any) -> Any:
    return np.where(np.isfinite(x), x, 0.0)


def _quotient(a: Value, b: Value) -> Value:
    it = a.it / b.it
    error = _finite((a.error + np.abs(it) * b.error) / np.abs(b.it))
    exact = bool(np.all(np.isin(np.abs(b.it), 2.0 ** np.arange(-6, 11))))
    found = _made(it, error, a, b)
    # kgen merges quotients, which loses the sign of a zero and so the sign of the infinity.
    return Value(found.it, found.ok & (b.it != 0), error=found.error, exact=found.exact and exact)


def _divided(op: type, a: Value, b: Value) -> Value:
    zero = b.it == 0
    divisor = np.where(zero, 1, b.it)
    it = a.it // divisor if op is ast.FloorDiv else a.it % divisor
    found = _wrap(it, a, b)
    return Value(found.it, a.used() & b.used() & ~zero, wide=found.wide)


def _bits(op: type, a: Value, b: Value) -> Value:
    if a.it.dtype == np.bool_:
        return (_both if op is ast.BitAnd else _either)(a, b)
    if op in (ast.LShift, ast.RShift):
        inside = (b.it >= 0) & (b.it < 32)
        by = np.where(inside, b.it, 0)
        found = _wrap(a.it << by if op is ast.LShift else a.it >> by, a, b)
        return Value(found.it, found.ok & inside, found.wrapped, wide=found.wide)
    return _wrap(_BITS[op](a.it, b.it), a, b)


_BITS: Mapping[type, Callable[..., Any]] = {
    ast.BitAnd: np.bitwise_and,
    ast.BitOr: np.bitwise_or,
    ast.BitXor: np.bitwise_xor,
    ast.LShift: np.left_shift,
    ast.RShift: np.right_shift,
}


def _both(a: Value, b: Value) -> Value:
    ok = (a.ok & b.ok) | (a.ok & ~a.it) | (b.ok & ~b.it)
    return Value(a.it & b.it, ok)


def _either(a: Value, b: Value) -> Value:
    ok = (a.ok & b.ok) | (a.ok & a.it) | (b.ok & b.it)
    return Value(a.it | b.it, ok)


def _negated(a: Value) -> Value:
    if a.it.dtype == np.bool_:
        return Value(~a.it, a.ok)
    return _wrap(-a.it, a) if a.whole else Value(-a.it, a.ok, error=a.error, exact=a.exact)


def _inverted(a: Value) -> Value:
    return Value(~a.it, a.ok, a.wrapped, wide=a.wide)


_UNARY: Mapping[type, Callable[[Value], Value]] = {
    ast.USub: _negated,
    ast.UAdd: lambda a: a,
    ast.Not: _negated,
    ast.Invert: _inverted,
}
_COMPARED: Mapping[type, Callable[..., Any]] = {
    ast.Lt: np.less,
    ast.LtE: np.less_equal,
    ast.Gt: np.greater,
    ast.GtE: np.greater_equal,
    ast.Eq: np.equal,
    ast.NotEq: np.not_equal,
}


def _compared(op: type, a: Value, b: Value) -> Value:
    if a.whole and b.whole:
        return Value(_COMPARED[op](a.it, b.it), a.used() & b.used())
    if a.it.dtype == np.bool_:
        return Value(_COMPARED[op](a.it, b.it), a.ok & b.ok)
    a, b = a.as_real(), b.as_real()
    near = np.abs(a.it - b.it) <= 4 * (a.error + b.error)
    decided = True if a.exact and b.exact else ~near
    return Value(_COMPARED[op](a.it, b.it), a.ok & b.ok & decided)


def _chosen(test: Value, a: Value, b: Value) -> Value:
    if a.real or b.real:
        a, b = a.as_real(), b.as_real()
    ok, wrapped, error = (
        np.where(test.it, x, y)
        for x, y in ((a.ok, b.ok), (a.wrapped, b.wrapped), (a.error, b.error))
    )
    it = np.where(test.it, a.it, b.it)
    return Value(it, test.ok & ok, wrapped, error, a.exact and b.exact, a.wide or b.wide)


# --- functions ------------------------


def _called(name: str, args: list[Value]) -> Value:
    if name == "where":
        return _chosen(*args)
    if name in ("min", "max"):
        return reduce(_MOST[name], args)
    if name == "clamp":
        x, low, high = args
        return _MOST["min"](_MOST["max"](x, low), high)
    (x, *rest) = args
    if name == "detach":  # only its derivative differs from its operand
        return x
    if name == "abs":
        it = np.abs(x.it)
        return _wrap(it, x) if x.whole else Value(it, x.ok, error=x.error, exact=x.exact)
    if name == "float":
        return x.as_real()
    if name == "int":
        return _truncated(x.as_real())
    if name == "pow":
        return _smooth(np.power, x.as_real(), rest[0].as_real())
    if name in _STEPS:
        return _stepped(_STEPS[name], x.as_real())
    return _smooth(_SMOOTH[name], x.as_real())


def _most(choose: Callable[..., Any]) -> Callable[[Value, Value], Value]:
    def most(a: Value, b: Value) -> Value:
        ok = a.ok & b.ok
        if a.whole and b.whole:
            return Value(
                choose(a.it, b.it), ok, a.wrapped | np.asarray(b.wrapped), wide=a.wide or b.wide
            )
        a, b = a.as_real(), b.as_real()
        error = np.maximum(a.error, b.error)
        return Value(choose(a.it, b.it), ok, error=error, exact=a.exact and b.exact)

    return most


_MOST = {"min": _most(np.minimum), "max": _most(np.maximum)}


def _index(x: Value) -> Value:
    """Return a value as an index.

    A real number that was rounded to a whole number becomes an integer.
    """
    return x if x.whole else _truncated(x)


def _truncated(x: Value) -> Value:
    small = np.abs(x.it) < _WRAPS
    clear = True if x.exact else np.abs(x.it - np.round(x.it)) > 4 * x.error
    return Value(np.where(small, np.trunc(x.it), 0).astype(np.int64), x.ok & small & clear)


def _stepped(step: Callable[..., Any], x: Value) -> Value:
    it = step(x.it)
    clear = True if x.exact else (step(x.it - 4 * x.error) == it) & (step(x.it + 4 * x.error) == it)
    return Value(it, x.ok & clear, error=np.zeros_like(it), exact=True)


def _smooth(function: Callable[..., Any], x: Value, *rest: Value) -> Value:
    it = function(x.it, *(r.it for r in rest))
    around = [function(x.it + sign * x.error, *(r.it for r in rest)) for sign in (-1, 1)]
    error = sum(_finite(np.abs(a - it)) for a in around)
    found = _made(it, error, x, *rest)
    return Value(found.it, found.ok, error=found.error, exact=False)


def _each(function: Callable[[float], float]) -> Callable[..., Any]:
    return np.vectorize(function, otypes=[np.float64])


def _sigmoid(x: Any) -> Any:
    return 0.5 * (1 + np.tanh(0.5 * x))


_STEPS: Mapping[str, Callable[..., Any]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.round,
    "sign": np.sign,
}
_SMOOTH: Mapping[str, Callable[..., Any]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "tanh": np.tanh,
    "atan": np.arctan,
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "sin": np.sin,
    "cos": np.cos,
    "erf": _each(math.erf),
    "gelu": lambda x: 0.5 * x * (1 + _each(math.erf)(x * math.sqrt(0.5))),
    "softplus": lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
    "log_sigmoid": lambda x: np.minimum(x, 0) - np.log1p(np.exp(-np.abs(x))),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "log1p": np.log1p,
    "expm1": np.expm1,
}
