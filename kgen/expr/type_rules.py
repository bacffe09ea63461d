"""Type rules of the function table: from the types of arguments to the type of the result, or an
error.
"""

from __future__ import annotations

from kgen.expr.nodes import Type

INT, LONG, FLOAT, BOOL = Type.INT, Type.LONG, Type.FLOAT, Type.BOOL


class TypeRuleError(Exception):
    """The arguments have types that the function does not take."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def numbers(types: tuple[Type, ...]) -> None:
    if BOOL in types:
        raise TypeRuleError(
            "expects numbers, got a bool", "use `where(condition, 1, 0)` to count a bool"
        )


def arithmetic(types: tuple[Type, ...]) -> Type:
    numbers(types)
    return FLOAT if FLOAT in types else width(types)


def width(types: tuple[Type, ...]) -> Type:
    """Return the width of an integer result: 64 bits if one operand has them."""
    return LONG if LONG in types else INT


def real(types: tuple[Type, ...]) -> Type:
    numbers(types)
    return FLOAT


def integral(types: tuple[Type, ...]) -> Type:
    if not all(t.integral for t in types):
        raise TypeRuleError(
            "expects integers on both sides",
            "for real numbers use `floor(x / y)`, and `x - y * floor(x / y)` for the remainder",
        )
    return width(types)


def bits(types: tuple[Type, ...]) -> Type:
    if not all(t.integral for t in types):
        raise TypeRuleError(
            "expects integers, whose bits it combines",
            (
                "write `x ** 2` for a power, `and`, `or` and `!=` for bools, `int(x)` for a real "
                "number"
            ),
        )
    return width(types)


def whole(types: tuple[Type, ...]) -> Type:
    numbers(types)
    if LONG in types:
        raise TypeRuleError("expects a real number, got an integer of 64 bits", "leave it out")
    return INT


def comparison(types: tuple[Type, ...]) -> Type:
    numbers(types)
    return BOOL


def logical(types: tuple[Type, ...]) -> Type:
    if any(t is not BOOL for t in types):
        raise TypeRuleError("expects bools", "compare first, for example `x != 0`")
    return BOOL


def choice(types: tuple[Type, ...]) -> Type:
    condition, *values = types
    if condition is not BOOL:
        raise TypeRuleError(
            "expects a bool as its condition", "compare first, for example `x != 0`"
        )
    if (BOOL in values) and any(t is not BOOL for t in values):
        raise TypeRuleError("has a bool and a number as branches", "make both numbers")
    return BOOL if BOOL in values else arithmetic(tuple(values))
