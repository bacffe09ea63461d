"""Python's arithmetic on numbers of the source, with limits on their size."""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable
from typing import Any

from kgen.flex.source import Place
from kgen.flex.values import External, Narrow, NarrowFloat, NarrowInt, is_number

MAX_BITS = 256
MAX_ITEMS = 10_000

_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "bitand": operator.and_,
    "bitor": operator.or_,
    "bitxor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "neg": operator.neg,
    "pos": operator.pos,
    "invert": operator.invert,
}

MATH = frozenset(
    {
        *("acos", "asin", "atan", "atan2", "ceil", "comb", "copysign", "cos", "cosh", "degrees"),
        *("erf", "exp", "expm1", "fabs", "floor", "fmod", "gcd", "isfinite", "isinf", "isnan"),
        *("isqrt", "ldexp", "log", "log10", "log1p", "log2", "pow", "prod", "radians", "sin"),
        *("sinh", "sqrt", "tan", "tanh", "trunc"),
    }
)


_FLOATS = {"float32": "f", "single": "f", "float16": "e", "half": "e"}
_BITS = {
    f"{sign}int{bits}": bits * (1 if sign else -1) for sign in ("u", "") for bits in (8, 16, 32, 64)
}
"""Bits of numpy's integer types, negative for signed types."""
_WIDE: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("int64", "int32", "intp", "int_"), int),
    **dict.fromkeys(("float64", "double"), float),
    "bool_": bool,
}
SCALARS = {*_FLOATS, *_BITS, *_WIDE}
"""Numpy's scalar types."""


def scalar(name: str, value: float) -> Any:
    """Return a numpy scalar. Raise `ValueError` for a number out of its range."""
    if name in _WIDE:
        return _WIDE[name](value)
    if name in _FLOATS:
        return NarrowFloat(struct.unpack(_FLOATS[name], struct.pack(_FLOATS[name], value))[0])
    bits = _BITS[name]
    lowest, end = (0, 2**bits) if bits > 0 else (-(2 ** (-bits - 1)), 2 ** (-bits - 1))
    if not lowest <= int(value) < end:
        raise ValueError(f"{value} does not fit into {name}")
    return NarrowInt(value)


_EXACT = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})


def apply(fn: str, args: tuple[Any, ...], place: Place) -> Any:
    """Apply a Python operator to numbers, or to sequences that support it."""
    if not all(is_number(a) or (fn in ("eq", "ne") and isinstance(a, str | None)) for a in args):
        if fn in ("eq", "ne") and not any(isinstance(a, list | tuple | dict) for a in args):
            return _same(*args) == (fn == "eq")
        if (
            fn == "add"
            and all(isinstance(a, list | tuple) for a in args)
            and type(args[0]) is type(args[1])
        ):
            return sized(args[0], len(args[1]), place) + args[1]
        if fn == "mul" and isinstance(args[0], list | tuple) and type(args[1]) is int:
            return sized((), len(args[0]) * max(args[1], 0), place) or args[0] * args[1]
        place.refuse("not-in-language", "this operation needs numbers", "write it with numbers")
    if fn not in _EXACT and any(isinstance(a, Narrow) for a in args):
        hint = "convert the scalar first, with `int(...)` or `float(...)`"
        place.refuse("not-known", "numpy would round this number or wrap around", hint)
    if all(isinstance(a, int) for a in args):
        bits = [int(a).bit_length() for a in args]
        if (
            (fn == "pow" and bits[0] * abs(args[1]) > MAX_BITS)
            or (fn == "lshift" and bits[0] + args[1] > MAX_BITS)
            or (fn == "mul" and sum(bits) > MAX_BITS)
        ):
            place.refuse(
                "too-large", f"the number has more than {MAX_BITS} bits", "write a smaller one"
            )
    return computed(lambda: _OPERATORS[fn](*args), place)


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) if isinstance(a, External) else a is b


def computed(work: Callable[[], Any], place: Place) -> Any:
    """Return the result of `work`. Refuse the place if Python raises."""
    try:
        value = work()
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        message = f"Python cannot compute this: {error}"
        place.refuse("bad-number", message, "check its operands")
    if isinstance(value, complex):
        place.refuse("bad-number", "this is a complex number", "only real numbers can be used")
    return value


def mathematics(name: str, args: list[Any], place: Place) -> Any:
    """Return the result of a function of `math` on numbers."""
    if name in ("comb", "prod", "gcd") and any(isinstance(a, int) and abs(a) > 2**16 for a in args):
        place.refuse(
            "too-large", f"the argument of `math.{name}` is too large", "write the result itself"
        )
    return computed(lambda: getattr(math, name)(*args), place)


def sized(items: Any, more: int, place: Place) -> Any:
    """Return the items. Refuse the place if `more` further items exceed the limit."""
    if len(items) + more > MAX_ITEMS:
        place.refuse(
            "too-large", f"the sequence has more than {MAX_ITEMS} items", "write a shorter one"
        )
    return items
