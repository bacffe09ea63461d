"""Explain the portable kernels for `kgen explain`."""

from __future__ import annotations

from kgen.kernels.attention.explaining.chips import chip_name
from kgen.kernels.attention.explaining.explained import Explained
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.plan.tuned import Tile
from kgen.spec.load import Loaded


def explained(loaded: Loaded, plan: AttentionPlan) -> Explained:
    """Return the loops and tiles of the portable kernels."""
    of_backward = {"dq": plan.tiles.dq, "dkdv": plan.tiles.dkdv} if plan.backward else {}
    tables = {"forward": plan.tiles.forward} | of_backward
    of_gradients = {"pairs": plan.tiles.pair} if plan.pairs else {}
    of_gradients |= {"diagonals": plan.tiles.diagonal} if plan.diagonals else {}
    loops = {"forward": plan.forward, "dq": plan.dq, "dkdv": plan.dkdv}
    return Explained(
        language="Portable kernels are in Triton.",
        tiles=[
            ("dk and dv" if kernel == "dkdv" else kernel, chip_name(chip), _words(tile))
            for kernel, table in (tables | of_gradients).items()
            for chip in sorted(table, reverse=True)
            for tile in table[chip]
        ],
        loops={kernel: loop for kernel, loop in loops.items() if loop is not None},
        tables=tables,
    )


def _words(tile: Tile) -> str:
    loads = ", TMA" if tile.TMA else ""
    return (
        f"{tile.BLOCK_M} x {tile.BLOCK_N}, {tile.num_warps} warps, {tile.num_stages} stages{loads}"
    )
