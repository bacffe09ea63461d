"""Random rewriter: different spellings of equal expressions."""

from __future__ import annotations

import random
from collections.abc import Callable

from kgen.expr.nodes import Call, Const, Node, Type, rebuild

Rewrite = Callable[[random.Random, Call], Node | None]
INTEGERS = (Type.INT, Type.LONG)
MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}


def _compares_integers(node: Call) -> bool:
    return node.fn in MIRRORED and all(a.type in INTEGERS for a in node.args)


def mirrored(_: random.Random, node: Call) -> Node | None:
    return Call(MIRRORED[node.fn], node.args[::-1], node.type) if node.fn in MIRRORED else None


def negated(_: random.Random, node: Call) -> Node | None:
    if _compares_integers(node):
        return Call("not", (Call(NEGATED[node.fn], node.args, node.type),), node.type)
    if node.fn in ("and", "or"):
        parts = tuple(Call("not", (a,), Type.BOOL) for a in node.args)
        return Call(
            "not", (Call({"and": "or", "or": "and"}[node.fn], parts, Type.BOOL),), Type.BOOL
        )
    return None


def stricter(_: random.Random, node: Call) -> Node | None:
    """Rewrite a <= b as a < b + 1, and the other comparisons accordingly."""
    other = {"le": ("lt", 1), "lt": ("le", -1), "ge": ("gt", -1), "gt": ("ge", 1)}
    if not _compares_integers(node) or node.fn not in other:
        return None
    fn, by = other[node.fn]
    left, right = node.args
    return Call(fn, (left, Call("add", (right, Const(by, Type.INT)), right.type)), Type.BOOL)


def moved(rng: random.Random, node: Call) -> Node | None:
    """Subtract one side, or a number, from both sides."""
    if not _compares_integers(node):
        return None
    left, right = node.args
    by = rng.choice((left, right, Const(rng.randrange(-9, 9), Type.INT)))
    return Call(node.fn, tuple(Call("sub", (a, by), a.type) for a in (left, right)), node.type)


def doubled(rng: random.Random, node: Call) -> Node | None:
    if not _compares_integers(node):
        return None
    by = Const(rng.choice((2, 3)), Type.INT)
    return Call(node.fn, tuple(Call("mul", (by, a), a.type) for a in node.args), node.type)


def swapped(_: random.Random, node: Call) -> Node | None:
    commutes = node.fn in ("and", "or") or (
        node.fn in ("add", "min", "max") and node.type in INTEGERS
    )
    return rebuild(node, node.args[::-1]) if commutes else None


def reversed_distance(_: random.Random, node: Call) -> Node | None:
    """Rewrite abs(a - b) as abs(b - a)."""
    (inner,) = node.args if node.fn == "abs" else (None,)
    if not isinstance(inner, Call) or inner.fn != "sub" or inner.type not in INTEGERS:
        return None
    return rebuild(node, (rebuild(inner, inner.args[::-1]),))


def turned(_: random.Random, node: Call) -> Node | None:
    """Rewrite x + s * (a - b) as x - s * (b - a), with the summands in either order."""
    if node.type is not Type.FLOAT or node.fn != "add":
        return None
    left, right = node.args
    if isinstance(right, Call) and right.fn == "mul":
        factor, distance = right.args
        if isinstance(distance, Call) and distance.fn == "sub" and distance.type in INTEGERS:
            return Call(
                "sub",
                (left, rebuild(right, (factor, rebuild(distance, distance.args[::-1])))),
                node.type,
            )
    return rebuild(node, (right, left))


def split(_: random.Random, node: Call) -> Node | None:
    """Rewrite s * (a - b) as s * a - s * b."""
    if node.type is not Type.FLOAT or node.fn != "mul":
        return None
    factor, distance = node.args
    if not isinstance(distance, Call) or distance.fn != "sub" or distance.type not in INTEGERS:
        return None
    return Call("sub", tuple(rebuild(node, (factor, part)) for part in distance.args), node.type)


REWRITES: tuple[Rewrite, ...] = (
    *(mirrored, negated, stricter, moved, doubled, swapped, reversed_distance),
    *(turned, split),
)


def rewritten(rng: random.Random, node: Node, rewrites: tuple[Rewrite, ...] = REWRITES) -> Node:
    """Return another spelling of the expression, rewritten from the leaves up."""
    if not isinstance(node, Call):
        return node
    node = rebuild(node, tuple(rewritten(rng, a, rewrites) for a in node.args))
    for _ in range(2):
        if isinstance(node, Call) and rng.random() < 0.7:
            node = rng.choice(rewrites)(rng, node) or node
    return node
