"""Explain the serving kernels for `kgen explain`."""

from __future__ import annotations

from collections.abc import Iterator

from kgen.kernels.attention.explaining.chips import chip_name
from kgen.kernels.attention.explaining.explained import Explained
from kgen.kernels.attention.explaining.visits import ranges
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.schedules.serve.plan import SEGMENT, ServePlan, plan_serve, serves
from kgen.pages.model import Block, Prose, Table, words
from kgen.spec.load import Loaded


def explained(loaded: Loaded, plan: AttentionPlan) -> Explained:
    """Return the loop over keys and the tiles of both lists."""
    if not serves(loaded):
        return Explained()
    serve = plan_serve(loaded)
    return Explained(
        passes={"serve": words("portable: on every chip, programs process a list of items")},
        sections={"Serving": [*serving(serve)]},
        loops={"serve": serve.attention.forward},
        tables={
            name: {chip: [tile] for chip, tile in tiles.items()}
            for name, tiles in _tables(serve).items()
        },
    )


def _tables(plan: ServePlan) -> dict[str, dict]:  # type: ignore[type-arg]
    found = {"serve, few rows": plan.few, "serve": plan.many}
    return {name: tiles for name, tiles in found.items() if tiles}


def serving(plan: ServePlan) -> Iterator[Block]:
    """Yield the section about serving."""
    row = "A row of a tile is a query of one head, and the heads that share K and V share a tile."
    yield Prose(words(f"A kernel writes a list of items: tiles of rows, and parts of keys. {row}"))
    yield ranges(plan.attention.forward, "each tile of rows")
    if plan.in_batches:
        how = f"Parts begin at multiples of {SEGMENT} keys, and are merged in order."
        yield Prose(words(how))
    rows = []
    for name, tiles in _tables(plan).items():
        for chip in sorted(tiles, reverse=True):
            tile = tiles[chip]
            sizes = f"at most {tile.BLOCK_M} rows x {tile.BLOCK_N} keys, {tile.num_warps} warps, "
            sizes += f"{tile.num_stages} stages"
            rows.append((words(name), words(chip_name(chip)), words(sizes)))
    yield Table(("kernel", "chip", "tile"), tuple(rows), plain_head=False)
