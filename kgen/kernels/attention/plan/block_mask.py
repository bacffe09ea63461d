"""The choice between spans and a block mask, and the programs of the kernel that builds a block
mask.

Spans (`kgen.expr.tile_ranges`) cost nothing and are exact for most masks. Other masks get lists:

- For each block of queries, its partial and its full blocks of keys.
- For each block of keys, its partial and its full blocks of queries, for dk and dv.

A block is as large as the largest tile, so that kernels of any tile shape can use one list. The
lists have the names of the `BlockMask` of FlexAttention. Full blocks follow the partial blocks in
one list of indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import lcm

from kgen.expr.algebra import call
from kgen.expr.hoist import Place, Program, hoist, place_of
from kgen.expr.mask_form import all_of, any_of, conjuncts, normalize
from kgen.expr.nodes import (
    FIRST_AT_LEAST,
    Call,
    Const,
    Node,
    Read,
    Type,
    Var,
    children,
    reads,
    substitute,
    transform,
    variables,
)
from kgen.expr.softmax_form import KV_IDX, Q_IDX, Q_START
from kgen.expr.spans import Span
from kgen.kernels.attention.plan.tiles import LARGEST_TILE

BLOCK_SIZE = LARGEST_TILE
"""Number of queries, and of keys, in a block."""

KV_START = Var("kv_start", Type.INT)
_PLACES = {
    "q_idx": Place(False, ("q",)),
    "kv_idx": Place(True, ("kv",)),
    KV_START.name: Place(True, ()),
}
_TILE = _PLACES["q_idx"] | _PLACES["kv_idx"]


@dataclass(frozen=True)
class BlockMask:
    """The programs of the kernel that builds a block mask.

    The kernel first classifies whole blocks with `decision`. It then evaluates the pairs of the
    undecided blocks one by one with `evaluation`.
    """

    condition: Node
    """The whole mask, including the bounds of both tensors."""
    pairs: Node
    """The conjuncts of `condition` that differ within a block."""
    sides: Mapping[Node, str]
    """Operands of `pairs` that depend on one index, with their names in `decision`."""
    decision: Program
    """Results: `some` (false if the block is empty), and each of `sides`, of which kernels take
    bounds.
    """
    evaluation: Program
    """Result: `mask`, which is `pairs` for a single pair."""
    by_batch: bool
    """True if the mask depends on the batch. Otherwise all batches share the lists."""
    by_head: bool
    """True if the mask depends on the head. Otherwise all heads share the lists."""


@dataclass(frozen=True)
class Choice:
    """The decision for or against a block mask, and its reasons."""

    listed: bool
    """True if there is a block mask."""
    conditions: tuple[Node, ...]
    """Conjuncts of the mask that no span describes."""
    period: int | None = None
    """Period of `conditions` in positions, if it is at most a block."""
    able: bool = True
    """True if the kernels support block masks."""


def choose(
    wanted: str, able: bool, unclassified: tuple[Node, ...], params: Mapping[str, object]
) -> Choice:
    """Apply `block_mask: auto | always | never`, which is `wanted`.

    With `auto`, a condition without a span gets lists, unless it repeats within a block. In that
    case every block is partial, and the lists would contain all blocks. `able` is true if the
    kernels support block masks.
    """
    numbers: dict[Node, Node] = {
        Var(n, Type.INT): Const(v, Type.INT) for n, v in params.items() if isinstance(v, int)
    }
    periods = [period(substitute(condition, numbers)) for condition in unclassified]
    known = [p for p in periods if p is not None]
    together = lcm(*known) if len(known) == len(periods) else None
    repeats = together is not None and together <= BLOCK_SIZE
    listed = able and (wanted == "always" or (wanted == "auto" and not repeats))
    return Choice(listed, unclassified, together if repeats and unclassified else None, able)


def plan_block_mask(
    condition: Node,
    spans: Iterable[Span],
    number: Callable[[Node], int | None],
    named: Mapping[Node, str],
    taken: frozenset[str],
) -> BlockMask:
    """Plan the block mask of a condition on `b`, `h`, `q_idx` and `kv_idx`.

    Args:
        spans: Supersets of the keys that the condition allows for a block of queries.
        number: Returns the value of a constant integer node, and None for other nodes.
        named: The names that the spec has for values.
        taken: The names that other values must not use.
    """
    names = variables(condition)

    def of_block(node: Node) -> Node:
        return transform(node, lambda part: _of_block(part, number))

    named = {of_block(node): name for node, name in named.items()}
    parts = conjuncts(of_block(normalize(condition)))
    of_blocks = [c for c in parts if not _axes(c)]
    pairs = all_of([c for c in parts if _axes(c)])
    sides = {side: f"side_{i}" for i, side in enumerate(dict.fromkeys(_sides(pairs)))}
    roots = {"some": (all_of([*_inside(spans), *of_blocks]), _PLACES[KV_START.name])}
    roots |= {name: (side, place_of(side, _PLACES)) for side, name in sides.items()}
    return BlockMask(
        condition=condition,
        pairs=pairs,
        sides=sides,
        decision=hoist(roots, _PLACES, taken | set(sides.values()), named),
        evaluation=hoist({"mask": (pairs, _TILE)}, _PLACES, taken, named),
        by_batch="b" in names,
        by_head="h" in names,
    )


def _axes(node: Node) -> frozenset[str]:
    return variables(node) & {"q_idx", "kv_idx"}


def _sides(node: Node) -> Iterator[Node]:
    """Yield the largest operands that depend on at most one index.

    The kernel computes their bounds in a block.
    """
    if len(_axes(node)) < 2:
        yield node
    elif (
        isinstance(node, Call)
        and node.fn in BOUNDED
        and all(a.type is not Type.FLOAT for a in node.args)
    ):
        for arg in node.args:
            yield from _sides(arg)


BOUNDED = frozenset({"and", "or", "lt", "le", "gt", "ge", "eq", "ne", "add", "sub", "neg"})
"""Operations whose bounds follow from those of their operands."""


def _of_block(node: Node, number: Callable[[Node], int | None]) -> Node:
    """Replace the index in `q_idx // 256` by the first of its block, because all have the same
    quotient.
    """
    if not (isinstance(node, Call) and node.fn == "floordiv" and node.args[0] in _FIRST):
        return node
    divisor = number(node.args[1])
    if not divisor or divisor < 0 or divisor % BLOCK_SIZE:
        return node
    return Call("floordiv", (_FIRST[node.args[0]], node.args[1]), Type.INT)


_FIRST: dict[Node, Node] = {Q_IDX: Q_START, KV_IDX: KV_START}


def _inside(spans: Iterable[Span]) -> list[Node]:
    """Return the condition that a block of keys overlaps a span.

    The list is empty if a span is unbounded, or if its bounds need a search.
    """
    touching: list[Node] = []
    for span in spans:
        bounds: list[Node] = []
        end = call("add", KV_START, Const(BLOCK_SIZE, Type.INT))
        bounds += [] if span.lo == Const(0, Type.INT) else [call("gt", end, span.lo)]
        bounds += [] if span.hi == Var("SK", Type.INT) else [call("lt", KV_START, span.hi)]
        searched = any(r.buffer.endswith(FIRST_AT_LEAST) for bound in bounds for r in reads(bound))
        if not bounds or searched:
            return []
        touching.append(all_of(bounds))
    return [any_of(touching)] if touching else []


def period(node: Node) -> int | None:
    """Return the period of a value in positions of queries and of keys.

    The period is 1 if the value depends on neither, and None if the value is not known to repeat.
    """
    if not _axes(node):
        return 1
    if isinstance(node, Var):
        return None
    if isinstance(node, Call) and node.fn == "mod":
        left, right = node.args
        if isinstance(right, Const) and right.value > 0 and _is_polynomial(left):
            return int(right.value)
    found = [period(child) for child in children(node)]
    known = [p for p in found if p is not None]
    return lcm(*known) if len(known) == len(found) else None


def _is_polynomial(node: Node) -> bool:
    """True if a value is an integer polynomial, so that its remainder follows from the remainders
    of its operands.
    """
    if isinstance(node, Read):
        return period(node) == 1
    if isinstance(node, Call) and node.fn not in ("add", "sub", "neg", "mul"):
        return period(node) == 1
    return node.type.integral and all(_is_polynomial(child) for child in children(node))
