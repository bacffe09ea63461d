"""The decoding kernels in words."""

from __future__ import annotations

from collections.abc import Iterator

from kgen.kernels.attention.explaining.chips import chip_name
from kgen.kernels.attention.explaining.explained import Explained
from kgen.kernels.attention.explaining.visits import ranges
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.schedules.decode.plan import MOST_QUERIES, DecodePlan, decodes, plan_decode
from kgen.pages.model import Block, Prose, Table, words
from kgen.spec.load import Loaded


def explained(loaded: Loaded, plan: AttentionPlan) -> Explained:
    """The loop over keys, and how it is split."""
    if not decodes(loaded):
        return Explained()
    decode = plan_decode(loaded)
    return Explained(
        passes={"decode": words("portable: keys are split over programs on every chip")},
        sections={"Decoding": [*decoding(decode)]},
        loops={"decode": decode.attention.forward},
        tables={"decode": {chip: [tile] for chip, tile in decode.tiles.items()}},
    )


def decoding(plan: DecodePlan) -> Iterator[Block]:
    """How few queries read many keys."""
    whose = "Any number of queries comes" if plan.alone else f"Up to {MOST_QUERIES} queries come"
    row = "a row of a tile is a query of one head, and the heads that share K and V share a tile."
    yield Prose(words(f"{whose} here; {row}"))
    yield ranges(plan.attention.forward, "each tile of rows")
    if plan.balanced:
        how = "a sequence gets as many of them as its share of all tiles."
        yield Prose(words(f"These tiles are split over programs: {how}"))
    else:
        how = "evenly, in as many parts for each sequence."
        yield Prose(words(f"These tiles are split over programs, {how}"))
    if plan.page_size is not None:
        several = "one" if plan.page_per_tile else "several"
        yield Prose(words(f"Keys lie in pages of {plan.page_size}, {several} to a tile."))
    rows = []
    for chip in sorted(plan.tiles, reverse=True):
        tile = plan.tiles[chip]
        sizes = f"at most {tile.BLOCK_M} rows x {tile.BLOCK_N} keys, {tile.num_warps} warps, "
        sizes += f"{tile.num_stages} stages, {tile.per_sm} programs for each multiprocessor"
        rows.append((words(chip_name(chip)), words(sizes)))
    yield Table(("chip", "tile"), tuple(rows), plain_head=False)
