"""Spellings of infinity in Python, found in the syntax tree, because masks use all of them."""

from __future__ import annotations

import ast
from typing import NamedTuple

_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64", "half", "float", "double"})
_WORDS = frozenset(sign + word for sign in ("", "+", "-") for word in ("inf", "infinity"))
"""Texts that Python's `float` reads as infinity, in lower case."""


class Infinity(NamedTuple):
    """An infinity.

    A `bound` is the last finite number of a dtype, which means -inf only as the value of a mask.
    """

    negative: bool
    bound: bool


def infinity(node: ast.expr) -> Infinity | None:
    """Return the infinity that `inf`, `-math.inf`, `float("-inf")` or
    `torch.finfo(torch.float32).min` spells, else None.
    """
    negative = False
    while True:
        match node:
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=inner):
                negative ^= isinstance(sign, ast.USub)
            case ast.Call(func=ast.Name("float"), args=[ast.Constant(str(text))], keywords=[]):
                word = text.strip().lower()
                return (
                    Infinity(negative ^ (word[0] == "-"), bound=False) if word in _WORDS else None
                )
            case ast.Call(func=ast.Name("float"), args=[inner], keywords=[]):
                pass
            case ast.Name("inf") | ast.Attribute(
                ast.Name("math" | "torch" | "np" | "numpy"), "inf"
            ):
                return Infinity(negative, bound=False)
            case ast.Attribute(ast.Call() as limits, "min" | "max" as which) if _is_of_reals(
                limits
            ):
                return Infinity(negative ^ (which == "min"), bound=True)
            case _:
                return None
        node = inner


def _is_of_reals(call: ast.Call) -> bool:
    """True for `torch.finfo` of a floating-point dtype."""
    match call:
        case ast.Call(ast.Attribute(ast.Name("torch" | "np" | "numpy"), "finfo"), [dtype], []):
            match dtype:
                case ast.Attribute(ast.Name("torch" | "np" | "numpy"), name):
                    return name in _FLOATS
                case ast.Attribute(ast.Name("score"), "dtype"):
                    return True
    return False


def scores(value: ast.expr) -> frozenset[ast.expr]:
    """Return the branches that may be the whole value: there, -inf hides the pair."""
    found: set[ast.expr] = set()
    waiting = [value]
    while waiting:
        match waiting.pop():
            case ast.IfExp(body=a, orelse=b) | ast.Call(func=ast.Name("where"), args=[_, a, b]):
                found |= {a, b}
                waiting += [a, b]
    return frozenset(found)
