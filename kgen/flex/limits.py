"""Integers of more than 32 bits: most stand for "no limit", as in `q_idx - kv_idx < 2**62`.

Integers of the language have 32 bits, so a comparison with a longer integer is constant. In an
operation with a real number, the integer is converted to a real number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kgen.expr.nodes import Node, Type
from kgen.expr.parse import INT32
from kgen.flex.inference import COMPARISONS
from kgen.flex.operations import Operations
from kgen.flex.values import Term

_BELOW = frozenset({"lt", "le", "ne"})
_BOUNDS = {"min": True, "max": False, "clamp_max": True, "clamp_min": False}
"""True if a bound above 32 bits has no effect in the function."""


def large(value: object) -> bool:
    """True for an integer of more than 32 bits."""
    return type(value) is int and value not in INT32


def is_real(term: Term, others: Sequence[Node | None]) -> bool:
    """True if an operation with a large integer has a real operand."""
    return term.fn == "div" or any(node is not None and node.type is Type.FLOAT for node in others)


def with_reals(term: Term) -> Term:
    """Return the operation with large integers converted to real numbers."""
    return Term(term.fn, [float(arg) if large(arg) else arg for arg in term.args], term.place)


def unlimited(ops: Operations, term: Term, others: Sequence[Node | None]) -> Node | None:
    """Return the tree of an operation on a large integer, or None.

    `others` has the trees of the arguments, with None for a large integer. Comparisons with an
    int64 tensor stay, because its elements may be as large.
    """
    nodes = [node for node in others if node is not None]
    if any(node.type is Type.LONG for node in nodes):
        return None
    if term.fn in COMPARISONS and len(nodes) == 1:
        first = large(term.args[0])
        above = (term.args[0] if first else term.args[1]) > 0
        if term.fn in ("eq", "ne"):
            return ops.number(term.fn == "ne")
        return ops.number((term.fn in _BELOW) == (above != first))
    if term.fn in _BOUNDS and len(nodes) == 1:
        limit = next(arg for arg in term.args if large(arg))
        return ops.numeric(nodes[0]) if (limit > 0) == _BOUNDS[term.fn] else None
    if term.fn == "clamp" and others[0] is not None:
        return _clamped(ops, term.args, others)
    return None


def _clamped(ops: Operations, args: Sequence[Any], nodes: Sequence[Node | None]) -> Node | None:
    value, least, most = nodes
    assert value is not None
    value = ops.numeric(value)
    if least is not None:
        return ops.call("max", value, ops.numeric(least)) if args[2] > 0 else None
    if most is not None:
        return ops.call("min", value, ops.numeric(most)) if args[1] < 0 else None
    return value if args[1] < 0 < args[2] else None
