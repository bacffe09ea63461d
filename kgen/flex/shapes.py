"""Shapes of whole tensors of the source: of constructors, and after operations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Extents = tuple[int | None, ...]


def of_lists(value: Any) -> tuple[Extents | None, list[Any]]:
    """Return the shape of nested lists and some of the leaves."""
    shape: list[int | None] = []
    while isinstance(value, list | tuple | range):
        shape.append(len(value))
        if not value:
            return tuple(shape), []
        if not isinstance(value[0], list | tuple | range):
            return tuple(shape), list(value)
        value = value[0]
    return None, []


def of_constructor(name: str, args: Sequence[Any], keywords: Mapping[str, Any]) -> Extents:
    if name in ("linspace", "logspace"):
        steps = keywords.get("steps", args[2] if len(args) > 2 else None)
        return (steps if type(steps) is int else None,)
    if not args or not all(isinstance(a, int | float) for a in args):
        return (None, None) if name == "eye" else (None,)
    if name == "eye":
        return (int(args[0]), int(args[-1]))
    start, stop, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    return (max(math.ceil((stop - start) / step), 0) if step else None,)


def broadcast(shapes: Sequence[Extents]) -> Extents | None:
    rank = max(map(len, shapes))
    result: list[int | None] = []
    for axis in range(-rank, 0):
        extents = {s[axis] for s in shapes if len(s) >= -axis} - {1}
        if len(extents) > 1:
            return None
        result.append(extents.pop() if extents else 1)
    return tuple(result)


MOVED = frozenset(
    {
        *(
            "squeeze",
            "transpose",
            "swapaxes",
            "permute",
            "expand",
            "repeat",
            "repeat_interleave",
            "tile",
        ),
        *("narrow", "index_select", "gather", "select", "movedim", "broadcast_to", "unflatten"),
    }
)
"""Methods whose result has elements of the tensor, and therefore its dtype."""


def moved(name: str, shape: Extents | None, args: Sequence[Any]) -> Extents | None:
    """Return the shape of the result, or None if it is unknown."""
    rank = 0 if shape is None else len(shape)
    if shape is None or not args or not all(type(n) is int and -rank <= n < rank for n in args):
        return None
    axes = [n % rank for n in args]
    if name == "squeeze" and len(axes) == 1 and shape[axes[0]] is not None:
        return shape if shape[axes[0]] != 1 else (*shape[: axes[0]], *shape[axes[0] + 1 :])
    if name == "permute" and len(axes) == rank:
        return tuple(shape[axis] for axis in axes)
    if name in ("transpose", "swapaxes") and len(axes) == 2:
        swapped = list(range(rank))
        swapped[axes[0]], swapped[axes[1]] = axes[1], axes[0]
        return tuple(shape[axis] for axis in swapped)
    return None


def reshaped(shape: Extents | None, sizes: Sequence[Any]) -> Extents:
    total = None if shape is None or None in shape else math.prod(n for n in shape if n is not None)
    known = math.prod(n for n in sizes if type(n) is int and n > 0)
    return tuple(
        None
        if type(n) is not int
        else n
        if n >= 0
        else None
        if total is None or not known
        else total // known
        for n in sizes
    )
