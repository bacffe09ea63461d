"""Tiles of kernels that split the keys over programs."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.sizes import KIB, SHARED_MEMORY


@dataclass(frozen=True)
class SplitTile:
    """At most `BLOCK_M` rows and `BLOCK_N` keys at once; `per_sm` programs fit on a
    multiprocessor.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    per_sm: int


def split_tiles(plan: AttentionPlan, paged: bool) -> dict[int, SplitTile]:
    """Return tiles by compute capability, without rows that are equal to row 0."""
    chosen = {chip: _tile(plan, paged, chip, limit) for chip, limit in SHARED_MEMORY.items()}
    return {chip: tile for chip, tile in chosen.items() if chip == 0 or tile != chosen[0]}


def _tile(plan: AttentionPlan, paged: bool, chip: int, limit: int) -> SplitTile:
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
    return SplitTile(rows, keys, warps, stages, per_sm=max(1, min(3, fit)))
