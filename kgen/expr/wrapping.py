"""Integers that are assumed not to wrap, so that their parts may become real numbers.

Integers are two's complement. `float(kv_idx * 1103515245 + 12345)` is the value of the low 32 bits
of the sum, and a sum of two reals would differ. `slope * (kv_idx - q_idx)` may be split: sums and
differences of positions, sizes, parameters, elements and small literals, times small literals, are
assumed to fit. So are values in a comparison, an index, `//` or `%`, where a wrap is out of
contract.
"""

from __future__ import annotations

from kgen.expr.nodes import Call, Const, Node, Type

LITERAL = 2**16
FACTOR = 2**10


def may_wrap(node: Node) -> bool:
    """True if an integer must be computed as written."""
    return not 0 <= _factor(node) <= FACTOR


def wrapped(node: Call) -> Const:
    """Return the sum, difference or product of two literals, wrapped to 32 bits: Python would print
    a larger number.
    """
    a, b = (int(arg.value) for arg in node.args if isinstance(arg, Const))
    value = {"add": a + b, "sub": a - b, "mul": a * b}[node.fn]
    return Const((value + 2**31) % 2**32 - 2**31, Type.INT)


def _factor(node: Node) -> int:
    """Return the largest factor of positions; -1 if it is unknown."""
    if isinstance(node, Const):
        return 1 if abs(node.value) <= LITERAL else -1
    if not isinstance(node, Call) or node.fn in ("floordiv", "mod"):
        return 1
    match node.fn, node.args:
        case "mul", (Const(), other) | (other, Const()):
            literal = next(abs(int(a.value)) for a in node.args if isinstance(a, Const))
            return max(1, literal) * _factor(other)
        case "mul" | "lshift", _:
            return -1
        case "where", (_, *values):
            found = [_factor(a) for a in values]
        case _:
            found = [_factor(a) for a in node.args]
    if min(found) < 0:
        return -1
    return sum(found) if node.fn in ("add", "sub") else max(found)
