"""Serving: one call for a batch of decodes, chunks of prompts and whole prompts, over paged keys.

Queries are packed end to end. A tile of rows has queries of one sequence, each with the query heads
of one KV head. A small kernel first writes a list of work items. An item is a tile of rows and a
part of its keys. The attention kernel has a program for each item and KV head, and a third kernel
merges the parts. All grids depend on shapes only, so a CUDA graph can replay them for any lengths.

Tiles of few rows and tiles of many rows have lists and launches of their own. With
`deterministic: batch` there is one list, and parts begin at fixed positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kgen.expr.nodes import variables
from kgen.kernels.attention.fields import Lengths
from kgen.kernels.attention.plan.model import Q_AXIS, AttentionPlan
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.plan.split_tiles import SplitTile, split_tiles
from kgen.spec.load import Loaded
from kgen.spec.once import once_each

SEGMENT = 2048
"""Keys per part with `deterministic: batch`, a multiple of every tile."""


@dataclass(frozen=True)
class ServePlan:
    """The serving kernels of one spec."""

    attention: AttentionPlan
    """The plan with the query heads of a KV head as rows. SQ and SK are the lengths of a
    sequence.
    """
    few: dict[int, SplitTile]
    """The tiles of sequences with few rows. Their number of rows depends on the call."""
    many: dict[int, SplitTile]
    """The tiles of other sequences. Empty if all sequences have tiles of one shape."""
    in_batches: bool
    """True if results must not depend on the batch."""


def serves(loaded: Loaded) -> bool:
    """True if the spec has serving kernels."""
    return "serve" in loaded.spec.passes


@once_each
def plan_serve(loaded: Loaded) -> ServePlan:
    """Return the serving kernels of a loaded attention spec."""
    plan = plan_attention(of_one_sequence(loaded), packed=True)
    in_batches = loaded.spec.deterministic == "batch"
    few = split_tiles(plan, paged=True)
    if in_batches:
        # The sums of a segment and of all segments before it need the registers of 8 warps.
        few = {chip: replace(tile, num_warps=8, per_sm=1) for chip, tile in few.items()}
    return ServePlan(
        attention=plan,
        few=few,
        many={} if in_batches else _many(plan, few),
        in_batches=in_batches,
    )


def of_one_sequence(loaded: Loaded) -> Loaded:
    """Return the spec of one sequence of a batch: its last query is at its last key."""
    changes = {"passes": ("decode",), "align": "end", "varlen": False, "lengths": Lengths()}
    changes |= {"block_mask": "never"}
    return replace(loaded, spec=loaded.spec.model_copy(update=changes))


def _many(plan: AttentionPlan, few: dict[int, SplitTile]) -> dict[int, SplitTile]:
    """Return the tiles of the forward kernel that load by pointers."""
    found = dict[int, SplitTile]()
    for chip in sorted({*few, *plan.tiles.forward}):
        *_, tile = plan.tiles.forward.get(chip, plan.tiles.forward[0])
        # With 128 keys, the addresses of rows in pages make registers spill.
        keys = min(tile.BLOCK_N, 64)
        found[chip] = SplitTile(tile.BLOCK_M, keys, tile.num_warps, tile.num_stages, per_sm=1)
    return {chip: tile for chip, tile in found.items() if chip == 0 or tile != found[0]}


def depends_on_tile(plan: AttentionPlan) -> bool:
    """True if the bits of a score depend on the first query of its tile."""
    results = plan.forward.program.results
    names = (variables(results[name]) for name in ("core", "qk_scale", "bias", "row_rest")
             if name in results)  # fmt: skip
    return any(Q_AXIS.start.name in of for of in names)
