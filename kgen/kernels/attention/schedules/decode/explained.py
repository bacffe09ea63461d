"""Explain the decoding kernels for `kgen explain`."""

from __future__ import annotations

from collections.abc import Iterator

from kgen.kernels.attention.explaining.chips import chip_name
from kgen.kernels.attention.explaining.explained import Explained
from kgen.kernels.attention.explaining.visits import ranges
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.schedules.decode.plan import (
    MOST_QUERIES,
    DecodePlan,
    decodes,
    plan_decode,
)
from kgen.pages.model import Block, Prose, Table, words
from kgen.spec.load import Loaded


def explained(loaded: Loaded, plan: AttentionPlan) -> Explained:
    """Return the loop over keys and its splits."""
    if not decodes(loaded):
        return Explained()
    decode = plan_decode(loaded)
    return Explained(
        passes={"decode": words("portable: on every chip, programs split the keys")},
        sections={"Decoding": [*decoding(decode)]},
        loops={"decode": decode.attention.forward},
        tables={"decode": {chip: [tile] for chip, tile in decode.tiles.items()}},
    )


def decoding(plan: DecodePlan) -> Iterator[Block]:
    """Yield the section about decoding."""
    whose = (
        "Calls of any number of queries" if plan.alone else f"Calls of up to {MOST_QUERIES} queries"
    )
    row = "A row of a tile is a query of one head, and the heads that share K and V share a tile."
    yield Prose(words(f"{whose} use this kernel. {row}"))
    yield ranges(plan.attention.forward, "each tile of rows")
    if plan.balanced:
        how = "the number for a sequence is proportional to its tiles."
        yield Prose(words(f"Several programs share these tiles: {how}"))
    else:
        how = "each sequence has the same number of splits."
        yield Prose(words(f"Several programs share these tiles: {how}"))
    if plan.page_size is not None:
        several = "one" if plan.page_per_tile else "several"
        yield Prose(words(f"Keys are in pages of {plan.page_size}, {several} per tile."))
    rows = []
    for chip in sorted(plan.tiles, reverse=True):
        tile = plan.tiles[chip]
        sizes = f"at most {tile.BLOCK_M} rows x {tile.BLOCK_N} keys, {tile.num_warps} warps, "
        sizes += f"{tile.num_stages} stages, {tile.per_sm} programs per multiprocessor"
        rows.append((words(chip_name(chip)), words(sizes)))
    yield Table(("chip", "tile"), tuple(rows), plain_head=False)
