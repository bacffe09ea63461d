"""Bounds of integers in a mask, from the limits that emitted launchers check."""

from __future__ import annotations

from collections.abc import Mapping

from kgen.expr.nodes import Const, Node, Read, Type, Var, measured

LENGTH = 2**29
"""Largest size, and upper limit of positions."""
FAR = 2**30
"""Farther than any position. Parameters and elements of int32 buffers lie within it; nothing larger
is added to one.
"""

_POSITIONS = frozenset({"b", "h", "q_idx", "kv_idx", "q_start", "q_last", "kv_start", "kv_last"})
_LENGTHS = _POSITIONS | {"B", "HQ", "HKV", "SQ", "SK"}
_ANY = (-(2**63), 2**63)


def magnitude(node: Node, values: Mapping[str, int]) -> int:
    """Return an upper bound of the absolute value. `values` has the values of parameters."""
    low, high = extent(node, values)
    return max(-low, high)


def extent(node: Node, values: Mapping[str, int]) -> tuple[int, int]:
    """Return a lower bound and an upper bound."""
    if isinstance(node, Const):
        return int(node.value), int(node.value)
    if isinstance(node, Var):
        known = values.get(node.name)
        if known is not None:
            return known, known
        return (0, LENGTH) if node.name in _LENGTHS or measured(node.name) else (-FAR, FAR)
    if isinstance(node, Read):
        return _ANY if node.type is Type.LONG else (-FAR, FAR)
    found = [extent(a, values) for a in node.args if a.type.integral]
    low, high = [e[0] for e in found], [e[1] for e in found]
    match node.fn:
        case "add":
            return low[0] + low[1], high[0] + high[1]
        case "sub":
            return low[0] - high[1], high[0] - low[1]
        case "neg":
            return -high[0], -low[0]
        case "mul":
            products = [a * b for a in found[0] for b in found[1]]
            return min(products), max(products)
        case "floordiv":
            if low[1] > 0:
                quotients = [a // b for a in found[0] for b in found[1]]
                return min(quotients), max(quotients)
        case "min":
            return min(low), min(high)
        case "max":
            return max(low), max(high)
    return _ANY
