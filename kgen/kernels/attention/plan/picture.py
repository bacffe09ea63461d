"""The grid of tiles that the forward loop visits, as text.

One character is a tile of queries (rows) by keys (columns): `.` is not visited, `+` is visited with
the mask, `#` without it. The grid evaluates the bounds of the plan, which the emitted kernel also
uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kgen.expr.functions import TABLE
from kgen.expr.nodes import (
    FIRST_AT_LEAST,
    Const,
    Node,
    Read,
    Type,
    Var,
    children,
    measured,
    reads,
    variables,
)
from kgen.expr.spans import Span
from kgen.expr.unparse import show
from kgen.kernels.attention.plan.block_mask import BLOCK_SIZE, BlockMask
from kgen.kernels.attention.plan.model import AttentionPlan, TileLoop
from kgen.pages.model import FULL, MASKED, SKIPPED

MOST = 64
"""Maximum number of tiles along one side. Longer sequences get larger tiles."""

MOST_PAIRS = 2**21
"""Maximum number of pairs to evaluate. Longer sequences are sampled."""

Number = bool | int | float
Row = list[int]
"""One row of a buffer. A picture ignores the leading indices."""


@dataclass(frozen=True)
class Picture:
    """The grid of tiles of one head."""

    rows: tuple[str, ...]
    """One string per row of tiles."""
    tile: tuple[int, int]
    """Queries and keys of a tile."""
    assumed: tuple[str, ...]
    """Assumptions about run-time values, in words."""


@dataclass(frozen=True)
class Run:
    """The arguments of the launch to draw. Other arguments get typical values for the length."""

    length: int
    """SQ and SK."""
    given: Mapping[str, int | float] = field(default_factory=dict)
    """Values of run-time parameters, by name."""
    heads: int = 1
    """Number of query heads."""
    head: int = 0
    """The head to draw."""


def conditions(plan: AttentionPlan) -> list[Node]:
    """Return the expressions that select the visited tiles: bounds of spans, or the condition of a
    block mask.
    """
    if plan.block_mask is not None:
        return [plan.block_mask.condition]
    return [node for span in plan.forward.spans for node in _bounds(span)]


def picture(plan: AttentionPlan, run: Run) -> Picture:
    """Draw the forward loop for b = 0.

    Raise `ArithmeticError` or `ValueError` if a bound cannot be evaluated with the values of `run`.
    """
    length = run.length
    chips = plan.tiles.forward
    shape = chips[90 if 90 in chips else max(chips)][0]
    stretch = math.ceil(length / MOST / min(shape.BLOCK_M, shape.BLOCK_N))
    tile = shape.BLOCK_M * max(1, stretch), shape.BLOCK_N * max(1, stretch)
    scalars, buffers, assumed = usual(plan, run)
    if plan.block_mask is not None:
        size = BLOCK_SIZE * max(1, math.ceil(length / MOST / BLOCK_SIZE))
        return Picture(*_listed(plan.block_mask, scalars, buffers, length, size, assumed))
    rows = tuple(
        "".join(_row(plan.forward, scalars, buffers, length, start, tile))
        for start in range(0, length, tile[0])
    )
    return Picture(rows, tile, assumed)


def _listed(
    mask: BlockMask,
    scalars: Mapping[str, Number | None],
    buffers: Mapping[str, Row],
    length: int,
    size: int,
    assumed: tuple[str, ...],
) -> tuple[tuple[str, ...], tuple[int, int], tuple[str, ...]]:
    """Classify blocks by their pairs.

    If there are more than `MOST_PAIRS`, evaluate a sample of the positions.
    """
    allowed = compiled(mask.condition, scalars, buffers)
    step = max(1, math.isqrt(length * length // MOST_PAIRS))
    places = [[*range(start, min(start + size, length), step)] for start in range(0, length, size)]
    rows = []
    for queries in places:
        row = ""
        for keys in places:
            seen = [allowed(q, k) for q in queries for k in keys]
            whole = all(seen) and max(queries[0], keys[0]) + size <= length
            row += FULL if whole else MASKED if any(seen) else SKIPPED
        rows.append(row)
    sampled = (f"looked at every {step}th position",) if step > 1 else ()
    return tuple(rows), (size, size), (*assumed, *sampled)


def _row(
    loop: TileLoop,
    scalars: Mapping[str, Number | None],
    buffers: Mapping[str, Row],
    length: int,
    first: int,
    tile: tuple[int, int],
) -> Iterator[str]:
    """Yield the tiles of the row of tiles whose first query is `first`."""
    env = {**scalars, "q_start": first, "q_last": min(first + tile[0], length) - 1}
    spans = [tuple(value(n, env, buffers) for n in _bounds(span)) for span in loop.spans]
    for start in range(0, length, tile[1]):
        end = start + tile[1]
        # A tile across the end of the keys needs the mask too.
        if not any(lo < end and start < hi for lo, hi, _, _ in spans):
            yield SKIPPED
        elif (
            any(full_lo <= start and end <= full_hi for _, _, full_lo, full_hi in spans)
            or not loop.masked
        ):
            yield FULL
        else:
            yield MASKED


def _bounds(span: Span) -> tuple[Node, Node, Node, Node]:
    empty = Const(0, span.lo.type)
    return span.lo, span.hi, *((span.full_lo, span.full_hi) if span.has_full else (empty, empty))


def usual(
    plan: AttentionPlan, run: Run
) -> tuple[dict[str, Number | None], dict[str, Row], tuple[str, ...]]:
    """Return typical values of scalars and of rows of buffers, and a line for each assumption.

    The values cover all names in `conditions(plan)`.
    """
    length, group = run.length, plan.spec.gqa if isinstance(plan.spec.gqa, int) else 1
    sizes = {"B": 1, "HQ": run.heads, "HKV": max(1, run.heads // group), "SQ": length, "SK": length}
    scalars: dict[str, Number | None] = {**sizes, "b": 0, "h": run.head}
    buffers: dict[str, Row] = {}
    assumed: list[str] = []
    listed = plan.block_mask is not None
    bounds = conditions(plan)
    for name, param in plan.spec.params.items():
        scalars[name] = param.value
        if param.runtime and any(name in variables(node) for node in bounds):
            usual = length // 4 if param.type == "int" else 1.0
            scalars[name] = run.given.get(name, usual)
            assumed.append(f"{name} = {scalars[name]}")
    for name in sorted(n for n in frozenset().union(*map(variables, bounds)) if measured(n)):
        scalars[name] = 3 * length // 4
        assumed.append(f"{show(Var(name, Type.INT))} = {scalars[name]}")
    quarter = max(1, length // 4)
    for name in dict.fromkeys(
        r.buffer.removesuffix(FIRST_AT_LEAST) for n in bounds for r in reads(n)
    ):
        buffer = plan.spec.buffers[name]
        extent = buffer.shape[-1] if buffer.shape else 1
        if buffer.sorted:
            buffers[name] = [i // quarter for i in range(length)]
            assumed.append(f"{name} in four parts of {quarter}")
        elif listed and extent not in ("B", "HQ", "HKV"):
            number = extent if isinstance(extent, int) else length
            run_of = max(1, quarter // 2) if number == length else 1
            buffers[name] = [
                int(i // run_of % 3 == 0) if buffer.dtype == "bool" else i // run_of % 3
                for i in range(number)
            ]
            words = "every third of" if buffer.dtype == "bool" else "0, 1 and 2 in turn along"
            assumed.append(f"{name}: {words} its last axis, in runs of {run_of}")
        elif extent in ("HQ", "HKV") and sizes[extent] > 1:
            # Each head has its own number, so that heads differ.
            buffers[name] = [
                3 * length // 4 * (i + 1) // sizes[extent] for i in range(sizes[extent])
            ]
            assumed.append(f"{name} up to {buffers[name][-1]}, more with each head")
        else:
            # One number: a length, an offset.
            buffers[name] = [3 * length // 4]
            assumed.append(f"{name} = {3 * length // 4}")
    return scalars, buffers, tuple(assumed)


def value(node: Node, env: Mapping[str, Number | None], buffers: Mapping[str, Row]) -> Any:
    """Evaluate a tree of scalars.

    Reads use the last index only, and return zero outside the buffer.
    """
    if isinstance(node, Const):
        return node.value
    if isinstance(node, Var):
        return env[node.name]
    if isinstance(node, Read):
        last = value(node.indices[-1], env, buffers) if node.indices else 0
        row = buffers[node.buffer.removesuffix(FIRST_AT_LEAST)]
        if node.buffer.endswith(FIRST_AT_LEAST):
            return next((i for i, element in enumerate(row) if element >= last), len(row))
        if len(row) == 1:
            return row[0]
        return row[last] if 0 <= last < len(row) else 0
    return TABLE[node.fn].value(*(value(a, env, buffers) for a in node.args))


def compiled(
    node: Node, scalars: Mapping[str, Number | None], buffers: Mapping[str, Row]
) -> Callable[[int, int], bool]:
    """Compile a condition to a function of `q_idx` and `kv_idx`."""
    rows: dict[str, Row] = {}

    def text(node: Node) -> str:
        if isinstance(node, Const):
            return repr(node.value)
        if isinstance(node, Var):
            return repr(scalars[node.name]) if measured(node.name) else node.name
        operands = [text(child) for child in children(node)]
        if isinstance(node, Read):
            row = buffers[node.buffer]
            rows[f"{node.buffer}_row"] = row
            if len(row) == 1:
                return f"{node.buffer}_row[0]"
            return f"({node.buffer}_row[_i] if 0 <= (_i := {operands[-1]}) < {len(row)} else 0)"
        form = TABLE[node.fn].spelled["python"].form
        if TABLE[node.fn].callable:
            return f"{node.fn}({', '.join(operands)})"
        return f"({form.format(*(f'({o})' for o in operands))})"

    written = f"lambda q_idx, kv_idx: {text(node)}"
    scope = {**_SCOPE, **scalars, **rows, "inf": math.inf}
    # `written` comes from `text`, not from a user
    made: Callable[[int, int], bool] = eval(written, scope)
    return made


_SCOPE: Mapping[str, Callable[..., Number]] = {
    name: row.value for name, row in TABLE.items() if row.callable
}
