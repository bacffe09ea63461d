"""Decoding: few queries over many keys, split over the keys so that the whole device reads them.

A program takes one KV head of one sequence, a tile of rows that are (query, head of the group), and a share of the KV
tiles that these rows see; a second kernel merges the shares. The time is that of reading K and V once, so the tile is
small, masks are evaluated everywhere, and nothing but the number of programs in flight is tuned.
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
"""Up to so many queries the emitted function decodes, where it has a forward kernel too."""


@dataclass(frozen=True)
class DecodeTile:
    """At most `BLOCK_M` rows and `BLOCK_N` keys at once; `per_sm` programs fit on a multiprocessor."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    per_sm: int


@dataclass(frozen=True)
class DecodePlan:
    """The decoding kernels of one spec."""

    attention: AttentionPlan
    """The attention with the query heads of a KV head as rows; its forward loop is the one that is split."""
    balanced: bool
    """Sequences see different numbers of tiles: programs are shared out in proportion to them, in the kernel."""
    tiles: dict[int, DecodeTile]
    page_size: int | None
    page_per_tile: bool
    """A tile of keys lies within one page."""
    alone: bool
    """There is no other portable forward kernel: all calls that no schedule for a chip takes come here."""
    hidden_by_head: bool
    """Keys are hidden from some query heads alone. Rows of a tile are of several heads, and what all of them do not see
    may be NaN."""


def decodes(loaded: Loaded) -> bool:
    """Whether the spec has decoding kernels; keys in pages are read by them whatever the number of queries."""
    return "decode" in loaded.spec.passes or loaded.spec.paged_kv is not None


def plan_decode(loaded: Loaded) -> DecodePlan:
    """The decoding kernels of a loaded attention spec."""
    plan = plan_attention(loaded, packed=True)
    page_size = None if loaded.spec.paged_kv is None else loaded.spec.paged_kv.page_size
    tiles = _tiles(plan, page_size is not None)
    bounds = [node for span in plan.forward.spans for node in (span.lo, span.hi)]
    return DecodePlan(
        attention=plan,
        balanced=any("b" in variables(n) for n in bounds) and not any(map(_searches, bounds)),
        tiles=tiles,
        page_size=page_size,
        page_per_tile=page_size is not None and all(page_size % t.BLOCK_N == 0 for t in tiles.values()),
        alone="forward" not in loaded.spec.passes or page_size is not None,
        hidden_by_head=any(
            {"kv_idx", "h"} <= names and "q_idx" not in names
            for names in map(variables, conjuncts(normalize(plan.mask_mod or TRUE)))
        ),
    )


def _searches(node: Node) -> bool:
    return any(isinstance(n, Read) and n.buffer.endswith(FIRST_AT_LEAST) for n in walk(node))


def _tiles(plan: AttentionPlan, paged: bool) -> dict[int, DecodeTile]:
    """By compute capability; a row equal to row 0 is left out."""
    chosen = {chip: _tile(plan, paged, chip, limit) for chip, limit in SHARED_MEMORY.items()}
    return {chip: tile for chip, tile in chosen.items() if chip == 0 or tile != chosen[0]}


def _tile(plan: AttentionPlan, paged: bool, chip: int, limit: int) -> DecodeTile:
    """The first tile in order of preference that fits: more stages first, except where a page has to be looked up
    ahead of the loads, which more programs hide better (docs/performance/decoding.md)."""
    spec = plan.spec
    bytes_per_element = 4 if spec.dtype == "fp32" else 2
    columns = sum(c.size for c in (*plan.qk_chunks, *plan.v_chunks))
    wide = columns > 512
    rows, warps = (32, 8) if wide else (64, 4)
    if spec.dtype == "fp32" and spec.precision != "tf32":
        rows, options = 16, [(32, 2), (32, 1), (16, 1)]
    else:
        options = [(64, 3)] * (chip >= 90 and not paged) + [(64, 2), (32, 2), (32, 1), (16, 1)]

    def shared(rows: int, keys: int, stages: int) -> int:
        streamed = bytes_per_element * keys * columns + 4 * plan.problem.tile_reads * rows * keys
        return bytes_per_element * rows * columns + stages * streamed + 2 * KIB

    keys, stages = next((o for o in options if shared(rows, *o) <= limit), options[-1])
    # With 16 rows the loop holds one buffer less than it has stages.
    fit = limit // shared(16, keys, max(1, stages - 1))
    return DecodeTile(rows, keys, warps, stages, per_sm=max(1, min(3, fit)))
