"""The grid of tiles that a loop visits, drawn for given lengths.

One character stands for a tile of queries (rows) by keys (columns): `.` is never visited, `+` is visited with
the mask, `#` without it. The bounds are those of the plan, evaluated with numbers: what is drawn is what the
emitted kernel does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from kgen.expr.functions import TABLE
from kgen.expr.nodes import Const, Node, Read, Var, reads, variables
from kgen.expr.tile_ranges import FIRST_AT_LEAST, Span
from kgen.plan.attention import AttentionPlan, TileLoop

MOST = 64
"""Tiles along one side of the picture; longer sequences get larger tiles."""

SKIPPED, MASKED, FULL = ".", "+", "#"

Row = list[int]
"""One row of a buffer; leading indices make no difference in a picture."""


@dataclass(frozen=True)
class Picture:
    """`rows` of characters, `tile` (queries, keys) of one, and what was assumed of run-time values."""

    rows: tuple[str, ...]
    tile: tuple[int, int]
    assumed: tuple[str, ...]


def picture(plan: AttentionPlan, length: int) -> Picture:
    """The forward loop for b = h = 0, with run-time values that are usual for such lengths."""
    chips = plan.tiles.forward
    shape = chips[90 if 90 in chips else max(chips)][0]
    stretch = math.ceil(length / MOST / min(shape.BLOCK_M, shape.BLOCK_N))
    tile = shape.BLOCK_M * max(1, stretch), shape.BLOCK_N * max(1, stretch)
    scalars, buffers, assumed = _usual(plan, length)
    rows = tuple(
        "".join(_row(plan.forward, {**scalars, "q_start": start}, buffers, length, tile))
        for start in range(0, length, tile[0])
    )
    return Picture(rows, tile, assumed)


def _row(
    loop: TileLoop, scalars: Mapping[str, Any], buffers: Mapping[str, Row], length: int, tile: tuple[int, int]
) -> Iterator[str]:
    env = {**scalars, "q_last": min(scalars["q_start"] + tile[0], length) - 1}
    spans = [tuple(value(n, env, buffers) for n in _bounds(span)) for span in loop.spans]
    for start in range(0, length, tile[1]):
        end = start + tile[1]
        # The end of the keys is a bound as any other: a tile across it needs the mask.
        if not any(lo < end and start < hi for lo, hi, _, _ in spans):
            yield SKIPPED
        elif any(full_lo <= start and end <= full_hi for _, _, full_lo, full_hi in spans) or not loop.masked:
            yield FULL
        else:
            yield MASKED


def _bounds(span: Span) -> tuple[Node, Node, Node, Node]:
    empty = Const(0, span.lo.type)
    return span.lo, span.hi, *((span.full_lo, span.full_hi) if span.has_full else (empty, empty))


def _usual(plan: AttentionPlan, length: int) -> tuple[dict[str, Any], dict[str, Row], tuple[str, ...]]:
    """Values of everything that the bounds name, and a line for each that a launch would give."""
    scalars: dict[str, Any] = {"B": 1, "HQ": 1, "HKV": 1, "SQ": length, "SK": length, "b": 0, "h": 0}
    buffers: dict[str, Row] = {}
    assumed: list[str] = []
    bounds = [node for span in plan.forward.spans for node in _bounds(span)]
    for name, param in plan.spec.params.items():
        scalars[name] = param.value
        if param.runtime and any(name in variables(node) for node in bounds):
            scalars[name] = length // 4 if param.type == "int" else 1.0
            assumed.append(f"{name} = {scalars[name]}")
    quarter = max(1, length // 4)
    for name in dict.fromkeys(r.buffer.removesuffix(FIRST_AT_LEAST) for n in bounds for r in reads(n)):
        buffer = plan.spec.buffers[name]
        if buffer.sorted:
            buffers[name] = [i // quarter for i in range(length)]
            assumed.append(f"{name} in four parts of {quarter}")
        else:
            # One number: a length, an offset.
            buffers[name] = [3 * length // 4]
            assumed.append(f"{name} = {3 * length // 4}")
    return scalars, buffers, tuple(assumed)


def value(node: Node, env: Mapping[str, Any], buffers: Mapping[str, Row]) -> Any:
    """A tree of scalars as a number; reads see the last index alone, and zero outside of the buffer."""
    if isinstance(node, Const):
        return node.value
    if isinstance(node, Var):
        return env[node.name]
    if isinstance(node, Read):
        last = value(node.indices[-1], env, buffers)
        row = buffers[node.buffer.removesuffix(FIRST_AT_LEAST)]
        if node.buffer.endswith(FIRST_AT_LEAST):
            return next((i for i, element in enumerate(row) if element >= last), len(row))
        if len(row) == 1:
            return row[0]
        return row[last] if 0 <= last < len(row) else 0
    return _operation(node.fn, len(node.args))(*(value(a, env, buffers) for a in node.args))


@cache
def _operation(fn: str, arity: int) -> Any:
    """A row of the function table as a Python function, from how the spec's own syntax spells it."""
    names = [f"x{i}" for i in range(arity)]
    form = TABLE[fn].spelled["python"].form
    body = f"{fn}({', '.join(names)})" if TABLE[fn].callable else form.format(*names)
    known = {"where": lambda c, a, b: a if c else b, "min": min, "max": max, "abs": abs}
    known["clamp"] = lambda x, low, high: min(max(x, low), high)
    scope = {**vars(math), **known}
    return eval(f"lambda {', '.join(names)}: {body}", scope)  # our own table, never the user's text
