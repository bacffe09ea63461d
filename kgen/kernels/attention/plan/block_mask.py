"""Which masks get a block mask: lists of the blocks of positions that they leave, made by a kernel.

Ranges of positions (`kgen.expr.tile_ranges`) cost nothing and are exact for most masks. What they cannot say is said by
lists: for each block of queries the blocks of keys that the mask leaves in part and those that it leaves whole, and
the same for each block of keys. Blocks are as large as the largest tile, so that one list serves kernels of any tile.
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
"""Queries and keys of a block."""

KV_START = Var("kv_start", Type.INT)
_PLACES = {
    "q_idx": Place(False, ("q",)),
    "kv_idx": Place(True, ("kv",)),
    KV_START.name: Place(True, ()),
}
_TILE = _PLACES["q_idx"] | _PLACES["kv_idx"]


@dataclass(frozen=True)
class BlockMask:
    """What the kernel that lists blocks computes.

    First of whole blocks: `decision` has the results `some`, a condition on blocks without which nothing is left of
    them, and one for each of `sides`, from whose least and greatest values in a block follows, for many blocks, that
    `pairs` holds everywhere or nowhere. Then of the pairs of the other blocks, one by one: the result `mask` of
    `evaluation`. `condition` is all of it. Batches and heads share lists unless the mask differs between them.
    """

    condition: Node
    pairs: Node
    sides: Mapping[Node, str]
    decision: Program
    evaluation: Program
    by_batch: bool
    by_head: bool


@dataclass(frozen=True)
class Choice:
    """Whether there is a block mask, and the conditions that decided it: those that no range takes account of.

    `period` is that of conditions that repeat within a block; `able` says whether the kernels support lists.
    """

    listed: bool
    conditions: tuple[Node, ...]
    period: int | None = None
    able: bool = True


def choose(wanted: str, able: bool, unclassified: tuple[Node, ...], params: Mapping[str, object]) -> Choice:
    """The rule behind `block_mask: auto`.

    A condition without a range asks for lists, unless it repeats within a block: then every block of the ranges has
    pairs of all kinds, and lists would name all of them. `able` says whether the kernels support lists.
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
    """The block mask of a condition on `b`, `h`, `q_idx` and `kv_idx`.

    `spans` are the keys that it may allow to a block of queries; `number` gives the value of a node that has one, and
    `named` the name that the spec has for a value. Other values take no name that is `taken`.
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
    """The largest parts of conditions that depend on one index alone: what bounds are taken of."""
    if len(_axes(node)) < 2:
        yield node
    elif isinstance(node, Call) and node.fn in BOUNDED and all(a.type is not Type.FLOAT for a in node.args):
        for arg in node.args:
            yield from _sides(arg)


BOUNDED = frozenset({"and", "or", "lt", "le", "gt", "ge", "eq", "ne", "add", "sub", "neg"})
"""Operations whose bounds follow from those of their operands."""


def _of_block(node: Node, number: Callable[[Node], int | None]) -> Node:
    """`q_idx // 256` is the same for all queries of a block: it is computed once, from the first."""
    if not (isinstance(node, Call) and node.fn == "floordiv" and node.args[0] in _FIRST):
        return node
    divisor = number(node.args[1])
    if not divisor or divisor < 0 or divisor % BLOCK_SIZE:
        return node
    return Call("floordiv", (_FIRST[node.args[0]], node.args[1]), Type.INT)


_FIRST: dict[Node, Node] = {Q_IDX: Q_START, KV_IDX: KV_START}


def _inside(spans: Iterable[Span]) -> list[Node]:
    """That a block of keys touches a span: a condition where spans say anything, and it takes no search."""
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
    """After how many positions, of queries or of keys, a value is the same again: 1 if it depends on neither, `None`
    if it is not known to repeat."""
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
    """Whether a value is made of integers by `+`, `-` and `*`, which a remainder passes through."""
    if isinstance(node, Read):
        return period(node) == 1
    if isinstance(node, Call) and node.fn not in ("add", "sub", "neg", "mul"):
        return period(node) == 1
    return node.type.integral and all(_is_polynomial(child) for child in children(node))
