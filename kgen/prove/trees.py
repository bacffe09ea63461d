"""Expression trees as z3 terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import z3

from kgen.expr.nodes import FIRST_AT_LEAST, Call, Const, Node, Read, Type
from kgen.prove.functions import Beyond, apply
from kgen.prove.world import World, number

INFINITY = "inf"


def term(world: World, node: Node, names: Mapping[str, Any]) -> Any:
    """Return the value of a tree for the values of its names."""
    done: dict[Node, Any] = {}

    def visit(part: Node) -> Any:
        if part not in done:
            done[part] = _term(world, part, names, visit)
        return done[part]

    return visit(node)


def _term(world: World, node: Node, names: Mapping[str, Any], visit: Any) -> Any:
    if isinstance(node, Const):
        return number(float(node.value) if node.type is Type.FLOAT else node.value)
    if isinstance(node, Call):
        return apply(world, node.fn, tuple(visit(a) for a in node.args))
    if isinstance(node, Read):
        indices = tuple(visit(i) for i in node.indices)
        if node.buffer.endswith(FIRST_AT_LEAST):
            return world.first_at_least(
                node.buffer.removesuffix(FIRST_AT_LEAST), indices[:-1], indices[-1]
            )
        value = world.read(node.buffer, indices)
        return value != 0 if node.type is Type.BOOL else value
    if node.name == INFINITY:
        return z3.Real(INFINITY)
    if node.name not in names:
        raise Beyond(f"the name {node.name}")
    return names[node.name]


def hidden(world: World, node: Node, names: Mapping[str, Any]) -> Any:
    """Return the condition that a written score is minus infinity, so the pair is masked."""
    if not isinstance(node, Call):
        return z3.BoolVal(False)
    inner = [hidden(world, a, names) for a in node.args]
    match node.fn:
        case "where":
            return z3.If(term(world, node.args[0], names), inner[1], inner[2])
        case "neg":
            one = node.args[0]
            return z3.BoolVal(getattr(one, "name", "") == INFINITY)
        case "add" | "min":
            return z3.Or(*inner)
        case "sub":
            return inner[0]
        case "max":
            return z3.And(*inner)
    return z3.BoolVal(False)
