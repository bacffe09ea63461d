"""Pass: the smallest and largest value of an index over the pairs of a tile.

An index such as `min(abs(q_idx - kv_idx), 1023)` or `clamp(kv_idx - q_idx, -64, 64)` saturates far
from the diagonal. It has one value in the tiles there, so a read at it loads one element. Bounds
are computed by interval arithmetic (Moore, Interval Analysis, 1966). If both bounds are equal, all
values are.
"""

from __future__ import annotations

from collections.abc import Mapping

from kgen.expr.algebra import call
from kgen.expr.nodes import Call, Const, Node, walk

Bounds = tuple[Node, Node]

_SATURATES = frozenset({"min", "max", "clamp"})


def tile_bounds(index: Node, ends: Mapping[Node, Bounds]) -> Bounds | None:
    """Return the bounds of an index over a tile whose positions lie between `ends`.

    The result is None if the bounds are unknown, or can be equal only in a tile of one pair.
    """
    saturates = any(
        isinstance(node, Call)
        and node.fn in _SATURATES
        and any(not _varies(a, ends) for a in node.args)
        for node in walk(index)
        if _varies(node, ends)
    )
    return _bounds(index, ends) if saturates else None


def _varies(node: Node, ends: Mapping[Node, Bounds]) -> bool:
    return any(n in ends for n in walk(node))


def _bounds(node: Node, ends: Mapping[Node, Bounds]) -> Bounds | None:
    if node in ends:
        return ends[node]
    if not _varies(node, ends):
        return node, node
    if not isinstance(node, Call) or not node.type.integral:
        return None
    found = [_bounds(a, ends) for a in node.args]
    known = [b for b in found if b is not None]
    if len(known) < len(found):
        return None
    low, high = [b[0] for b in known], [b[1] for b in known]
    match node.fn:
        case "add" | "min" | "max" | "clamp":
            return call(node.fn, *low), call(node.fn, *high)
        case "sub":
            return call("sub", low[0], high[1]), call("sub", high[0], low[1])
        case "neg":
            return call("neg", high[0]), call("neg", low[0])
        case "abs":
            negative = call("neg", high[0]), call("neg", low[0])
            return call("max", low[0], negative[0]), call("max", high[0], negative[1])
        case "mul" | "floordiv":
            return _scaled(node.fn, low, high)
    return None


def _scaled(fn: str, low: list[Node], high: list[Node]) -> Bounds | None:
    """Return bounds of `x * n`, `n * x` or `x // n`, which increase with x if n is a positive
    number.
    """
    if fn == "mul" and isinstance(low[0], Const):
        low, high = low[::-1], high[::-1]
    factor = low[1]
    if not (isinstance(factor, Const) and factor.value > 0 and high[1] == factor):
        return None
    return call(fn, low[0], factor), call(fn, high[0], factor)
