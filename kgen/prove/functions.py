"""The function table over z3 terms.

`//` and `%` are Python's, and reals do not round. About functions such as `exp`, z3 knows only that
equal arguments have equal values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import z3

from kgen.expr.functions import TABLE
from kgen.prove.world import World, number


class Beyond(Exception):
    """A term that has no encoding."""


def floor_div(a: Any, b: Any) -> Any:
    """Return Python's quotient. The quotient of z3 is the floor only for positive divisors."""
    if _above_zero(b):
        whole, rest = _multiples(a, z3.simplify(b).as_long())
        return whole + rest / b
    return z3.If(b > 0, a / b, (-a) / (-b))


def floor_mod(a: Any, b: Any) -> Any:
    """Return Python's remainder, which has the sign of the divisor."""
    if _above_zero(b):
        return _multiples(a, z3.simplify(b).as_long())[1] % b
    return a - b * floor_div(a, b)


def toward_zero(a: Any, b: Any) -> Any:
    """Return the quotient of C++, and of `//` in Triton."""
    # z3 rounds quotients of non-negative numbers toward zero
    return z3.If(a >= 0, a / b, -((-a) / b))


def of_bits(fn: str, a: Any, b: Any) -> Any | None:
    """Return arithmetic for a shift by a number, or for a mask of low or high bits; None for other
    operations.
    """
    if fn == "bitand" and z3.is_int_value(z3.simplify(a)):
        a, b = b, a
    known = z3.simplify(b)
    if not (z3.is_int(a) and z3.is_int_value(known)):
        return None
    bits = known.as_long()
    if fn in ("lshift", "rshift"):
        if not 0 <= bits < 32:  # undefined
            return None
        size = z3.IntVal(2**bits)
        return a * size if fn == "lshift" else floor_div(a, size)
    size = bits + 1 if bits >= 0 else -bits
    if size & (size - 1):
        return None
    rest = floor_mod(a, z3.IntVal(size))
    return rest if bits >= 0 else a - rest


def _above_zero(b: Any) -> bool:
    b = z3.simplify(b)
    return bool(z3.is_int_value(b) and b.as_long() > 0)


def _multiples(a: Any, n: int) -> tuple[Any, Any]:
    """Split a sum into `whole` and `rest`, so that it equals `n * whole + rest`.

    So `(128 * tile + row) // 16` becomes `8 * tile + row // 16`.
    """
    a = z3.simplify(a)
    whole, rest = z3.IntVal(0), z3.IntVal(0)
    for part in a.children() if z3.is_add(a) else [a]:
        factor, *others = part.children() if z3.is_mul(part) else [part]
        if z3.is_int_value(factor) and factor.as_long() % n == 0:
            whole = whole + z3.IntVal(factor.as_long() // n) * (others[0] if others else 1)
        else:
            rest = rest + part
    return whole, rest


def real(a: Any) -> Any:
    """Return a number as a real."""
    if z3.is_bool(a):
        return z3.If(a, z3.RealVal(1), z3.RealVal(0))
    return z3.ToReal(a) if z3.is_int(a) else a


def _alike(args: tuple[Any, ...]) -> tuple[Any, ...]:
    if all(z3.is_bool(a) for a in args):
        return args
    args = tuple(z3.If(a, z3.IntVal(1), z3.IntVal(0)) if z3.is_bool(a) else a for a in args)
    return args if all(z3.is_int(a) for a in args) else tuple(real(a) for a in args)


def _min(a: Any, b: Any) -> Any:
    return z3.If(a <= b, a, b)


def _max(a: Any, b: Any) -> Any:
    return z3.If(a >= b, a, b)


_MEANING: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "min": lambda *a: reduce(_min, a),
    "max": lambda *a: reduce(_max, a),
    "clamp": lambda x, lo, hi: _min(_max(x, lo), hi),
    "abs": lambda a: z3.If(a >= 0, a, -a),
    "invert": lambda a: -a - 1,
    "sign": lambda a: z3.If(
        real(a) > 0, z3.RealVal(1), z3.If(real(a) < 0, z3.RealVal(-1), z3.RealVal(0))
    ),
    "ceil": lambda a: -z3.ToReal(z3.ToInt(-real(a))),
    "floordiv": floor_div,
    "mod": floor_mod,
}


def apply(world: World, fn: str, args: tuple[Any, ...]) -> Any:
    """Return a function of the table, applied to terms."""
    match fn:
        case "and":
            return z3.And(*args)
        case "or":
            return z3.Or(*args)
        case "not":
            return z3.Not(args[0])
        case "where":
            return z3.If(args[0], *_alike(args[1:]))
        case "float":
            return real(args[0])
        case "detach":
            return args[0]
        case "div":
            return real(args[0]) / real(args[1])
        case "floor":
            return z3.ToReal(z3.ToInt(real(args[0])))
        case "floordiv" if (known := world.quotient(*args)) is not None:
            return known
        case "int":
            return _whole(real(args[0]))
    if fn in _OF_BITS:
        return _bits(world, fn, *_alike(args))
    if fn in _MEANING:
        return _MEANING[fn](*_alike(args))
    # Only congruence is known, so a normal form of the arguments makes equal ones identical.
    ordered = [z3.simplify(real(a), som=True) for a in args]
    if (known := _of_numbers(fn, ordered)) is not None:
        return known
    return world.of_row(fn, z3.RealSort(), ordered)


def _of_numbers(fn: str, args: Sequence[Any]) -> Any | None:
    """Return the value of a function if all arguments are numbers, else None."""
    if not all(z3.is_rational_value(a) for a in args):
        return None
    try:
        found = TABLE[fn].value(*(float(a.as_fraction()) for a in args))
        return number(float(found))
    except (ArithmeticError, ValueError, TypeError):
        return None


_OF_BITS = frozenset({"lshift", "rshift", "bitand", "bitor", "bitxor"})
_SYMMETRIC = frozenset({"bitand", "bitor", "bitxor"})
_BOOLEAN: dict[str, Callable[..., Any]] = {"bitand": z3.And, "bitor": z3.Or, "bitxor": z3.Xor}


def _bits(world: World, fn: str, a: Any, b: Any) -> Any:
    """Return a bit operation as arithmetic if a number selects the bits.

    Otherwise only congruence is known, with operands in one order, and that the result of 32-bit
    numbers has 32 bits.
    """
    if z3.is_bool(a):
        return _BOOLEAN[fn](a, b)
    a, b = z3.simplify(a), z3.simplify(b)
    if z3.is_int_value(a) and z3.is_int_value(b) and (fn in _SYMMETRIC or 0 <= b.as_long() < 32):
        return z3.IntVal(TABLE[fn].value(a.as_long(), b.as_long()))
    if fn in ("lshift", "rshift", "bitand") and (found := of_bits(fn, a, b)) is not None:
        return found
    if fn in _SYMMETRIC:
        a, b = sorted((a, b), key=lambda term: term.sexpr())
    found = world.of_row(fn, z3.IntSort(), [a, b])
    if fn != "lshift":
        narrow = [z3.And(term >= -(2**31), term < 2**31) for term in (a, b, found)]
        world.facts.append(z3.Implies(z3.And(narrow[:2]), narrow[2]))
    return found


def _whole(a: Any) -> Any:
    """Round a real toward zero."""
    return z3.If(a >= 0, z3.ToInt(a), -z3.ToInt(-a))
