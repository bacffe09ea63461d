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
from kgen.sizes import KIB, SHARED_MEMORY
from kgen.spec.load import Loaded

MOST_QUERIES = 64
"""Maximum number of queries for decoding, if the emitted function also has a forward kernel."""


@dataclass(frozen=True)
class DecodeTile:
    """At most `BLOCK_M` rows and `BLOCK_N` keys at once; `per_sm` programs fit on a
    multiprocessor.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    per_sm: int


@dataclass(frozen=True)
class DecodePlan:
    """The decoding kernels of one spec."""

    attention: AttentionPlan
    """The plan with the query heads of a KV head as rows. Its forward loop is split."""
    balanced: bool
    """True if sequences see different numbers of tiles: the kernel assigns programs in
    proportion.
    """
    tiles: dict[int, DecodeTile]
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
    tiles = _tiles(plan, page_size is not None)
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


def _tiles(plan: AttentionPlan, paged: bool) -> dict[int, DecodeTile]:
    """Return tiles by compute capability, without rows that are equal to row 0."""
    chosen = {chip: _tile(plan, paged, chip, limit) for chip, limit in SHARED_MEMORY.items()}
    return {chip: tile for chip, tile in chosen.items() if chip == 0 or tile != chosen[0]}


def _tile(plan: AttentionPlan, paged: bool, chip: int, limit: int) -> DecodeTile:
    """Return the first tile that fits, in order of preference: more stages first.

    With pages, the loads wait for the lookup of a page. More programs hide this wait better than
    more stages (docs/performance/decoding.md).
    """
    spec = plan.spec
    bytes_per_element = 4 if spec.dtype == "fp32" else 2
    columns = sum(c.size for c in (*plan.qk_chunks, *plan.v_chunks))
    wide = columns > 512
    rows, warps = (32, 8) if wide else (64, 4)
    if spec.dtype == "fp32" and spec.precision != "tf32":
        rows, options = 16, [(32, 2), (32, 1), (16, 1)]
    else:
        options = [(64, 2), (32, 2), (32, 1), (16, 1)]
        if chip >= 90 and not paged:
            options.insert(0, (64, 3))

    def shared(rows: int, keys: int, stages: int) -> int:
        streamed = bytes_per_element * keys * columns + 4 * plan.problem.tile_reads * rows * keys
        return bytes_per_element * rows * columns + stages * streamed + 2 * KIB

    keys, stages = next((o for o in options if shared(rows, *o) <= limit), options[-1])
    # With 16 rows, the loop has one buffer less than stages.
    fit = limit // shared(16, keys, max(1, stages - 1))
    return DecodeTile(rows, keys, warps, stages, per_sm=max(1, min(3, fit)))
