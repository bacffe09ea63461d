"""Analysis: values that may be infinite or NaN for hidden pairs.

The contract makes the score of each visible pair finite. Scores of hidden pairs are unknown: a row,
head or batch without a visible key may divide by zero or read an infinite element. Zero times such
a value is NaN.
"""

from __future__ import annotations

from collections.abc import Collection

from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, Const, Node, Read, Type, Var, distinct, measured
from kgen.expr.rows import Finite

NOT_ZERO = frozenset({"B", "HQ", "HKV"})
"""Sizes that are at least 1 in every launch. There may be no queries, or no keys."""


def may_be_nan(node: Node, not_zero: Collection[str] = NOT_ZERO) -> bool:
    """True if a value may be infinite or NaN.

    Names in `not_zero` are divisors that are not zero.
    """
    return any(is_open_ended(part, not_zero) for part in distinct(node))


def is_open_ended(node: Node, not_zero: Collection[str] = NOT_ZERO) -> bool:
    """True if a value may be infinite or NaN although its operands are finite."""
    if isinstance(node, Call):
        if node.fn == "div":
            return not _is_not_zero(node.args[1], not_zero)
        if node.fn in _POWERS and sign(node.args[0]) == -1:
            return False  # at most 1
        return TABLE[node.fn].finite is not Finite.EVERYWHERE
    return (isinstance(node, Read) and node.type is Type.FLOAT) or (
        isinstance(node, Var) and node.name == "inf"
    )


def _is_not_zero(divisor: Node, not_zero: Collection[str]) -> bool:
    if isinstance(divisor, Call) and divisor.fn == "float":
        divisor = divisor.args[0]
    if isinstance(divisor, Var):
        return divisor.name in not_zero
    return isinstance(divisor, Const) and bool(divisor.value)


_POWERS = frozenset({"exp", "exp2", "expm1"})
_COUNTED = frozenset(
    {"B", "HQ", "HKV", "SQ", "SK", "b", "h", "q_idx", "kv_idx", "q_start", "kv_start"}
)


def sign(node: Node) -> int:
    """Return 1 for a value that is never negative, -1 for one that is never positive, else 0."""
    if isinstance(node, Const):
        return 1 if node.value >= 0 else -1
    if isinstance(node, Var):
        return int(node.name in _COUNTED or measured(node.name) is not None)
    if not isinstance(node, Call):
        return 0
    signs = [sign(a) for a in node.args]
    match node.fn:
        case "neg":
            return -signs[0]
        case "float":
            return signs[0]
        case "mul" | "div":
            return signs[0] * signs[1]
        case "add":
            return signs[0] if signs[0] == signs[1] else 0
        case "sub":
            return signs[0] if signs[0] == -signs[1] else 0
    return int(node.fn in ("abs", "exp", "exp2"))
