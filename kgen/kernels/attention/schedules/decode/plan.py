"""Decoding: few queries over many keys. Programs split the keys, so that the whole device reads
them.

A program has one KV head of one sequence, and a tile of rows (query, head of the group). It
processes one split of the KV tiles that these rows see, and a second kernel merges the splits. The
run time is the time to read K and V once. So the tile is small, each tile evaluates the mask, and
only the number of programs in flight is tuned.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.expr.mask_form import TRUE, conjuncts, normalize
from kgen.expr.nodes import FIRST_AT_LEAST, Node, Read, variables, walk
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.plan.split_tiles import SplitTile, split_tiles
from kgen.spec.load import Loaded

MOST_QUERIES = 64
"""Maximum number of queries for decoding, if the emitted function also has a forward kernel."""


@dataclass(frozen=True)
class DecodePlan:
    """The decoding kernels of one spec."""

    attention: AttentionPlan
    """The plan with the query heads of a KV head as rows. Its forward loop is split."""
    balanced: bool
    """True if sequences see different numbers of tiles: the kernel assigns programs in
    proportion.
    """
    tiles: dict[int, SplitTile]
    page_size: int | None
    page_per_tile: bool
    """True if a tile of keys is within one page."""
    alone: bool
    """True if there is no other portable forward kernel, so these kernels serve calls of any
    size.
    """
    hidden_by_head: bool
    """True if keys are hidden from only some query heads.

    Rows of a tile belong to several heads, and keys that none of them sees may be NaN."""


def decodes(loaded: Loaded) -> bool:
    """True if the spec has decoding kernels. They also serve all calls with paged keys."""
    return "decode" in loaded.spec.passes or loaded.spec.paged_kv is not None


def plan_decode(loaded: Loaded) -> DecodePlan:
    """Return the decoding kernels of a loaded attention spec."""
    plan = plan_attention(loaded, packed=True)
    page_size = None if loaded.spec.paged_kv is None else loaded.spec.paged_kv.page_size
    tiles = split_tiles(plan, page_size is not None)
    bounds = [node for span in plan.forward.spans for node in (span.lo, span.hi)]
    return DecodePlan(
        attention=plan,
        balanced=any("b" in variables(n) for n in bounds) and not any(map(_searches, bounds)),
        tiles=tiles,
        page_size=page_size,
        page_per_tile=page_size is not None
        and all(page_size % t.BLOCK_N == 0 for t in tiles.values()),
        alone="forward" not in loaded.spec.passes or page_size is not None,
        hidden_by_head=any(
            {"kv_idx", "h"} <= names and "q_idx" not in names
            for names in map(variables, conjuncts(normalize(plan.mask_mod or TRUE)))
        ),
    )


def _searches(node: Node) -> bool:
    return any(isinstance(n, Read) and n.buffer.endswith(FIRST_AT_LEAST) for n in walk(node))
