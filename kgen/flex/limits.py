"""Integers of more than 32 bits: most stand for "no limit", as in `q_idx - kv_idx < 2**62`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kgen.expr.nodes import Node, Type
from kgen.expr.parse import INT32
from kgen.flex.inference import COMPARISONS
from kgen.flex.values import Term

if TYPE_CHECKING:
    from kgen.flex.lowering import Lowering

_BELOW = frozenset({"lt", "le", "ne"})
_BOUNDS = {"min": True, "max": False, "clamp_max": True, "clamp_min": False}
"""True if a bound that is too great for 32 bits bounds nothing."""


def unlimited(low: Lowering, term: Term) -> Node | None:
    """The tree of an operation on such an integer; None if there is none.

    Integers of the language have 32 bits, so what they are compared with decides the comparison. Beside a real number
    the integer is real. A tensor of int64 may hold as much, and is not decided.
    """
    others = [low.of(arg) for arg in term.args if not _large(arg)]
    if any(node.type is Type.FLOAT for node in others) or term.fn == "div":
        return low.node(Term(term.fn, [float(a) if _large(a) else a for a in term.args], term.place))
    if any(node.type is Type.LONG for node in others):
        return None
    if term.fn in COMPARISONS and len(others) == 1:
        first = _large(term.args[0])
        above = (term.args[0] if first else term.args[1]) > 0
        if term.fn in ("eq", "ne"):
            return low.number(term.fn == "ne")
        return low.number((term.fn in _BELOW) == (above != first))
    if term.fn in _BOUNDS and len(others) == 1:
        limit = next(arg for arg in term.args if _large(arg))
        return low.numeric(others[0]) if (limit > 0) == _BOUNDS[term.fn] else None
    if term.fn == "clamp" and not _large(term.args[0]):
        return _clamped(low, *term.args)
    return None


def _clamped(low: Lowering, value: Any, least: Any, most: Any) -> Node | None:
    node = low.numeric(low.of(value))
    if _large(least) and _large(most):
        return node if least < 0 < most else None
    if _large(least):
        return low.call("min", node, low.numeric(low.of(most))) if least < 0 else None
    return low.call("max", node, low.numeric(low.of(least))) if most > 0 else None


def _large(value: object) -> bool:
    return type(value) is int and value not in INT32
