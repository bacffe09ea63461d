"""Tile shapes by chip: how many rows of each side a program takes, and how many warps and pipeline stages it has.

A table has a row for each chip that was tuned or reasoned about, and the row 0, which every other chip uses: it fits in the
99 KiB of shared memory that the smallest supported parts give a block. Rows that would not fit are left out by an estimate
of what the compiler will ask for; `kgen compile` holds the estimate against the compiler.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024

# Shared memory that one block may have, by compute capability (CUDA programming guide, "Compute Capabilities").
SHARED_MEMORY = {80: 163 * KIB, 90: 227 * KIB, 100: 227 * KIB, 0: 99 * KIB}


@dataclass(frozen=True)
class Tile:
    """Rows of queries and of keys that a program holds at once, its warps, and the depth of its load pipeline."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class TileTables:
    """Tiles by compute capability (90 for 9.0; 0 for any other), for each kernel of attention."""

    forward: dict[int, Tile]
    dq: dict[int, Tile]
    dkdv: dict[int, Tile]


# Best first; the first that fits is taken.
_FORWARD = {
    90: [Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)],
    100: [Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)],
    80: [Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)],
    0: [Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)],
}
_DQ = {
    90: [Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)],
    100: [Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)],
    80: [Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)],
    0: [Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)],
}
_DKDV = {
    90: [Tile(64, 128, 8, 3), Tile(64, 128, 8, 2), Tile(64, 64, 4, 2)],
    100: [Tile(64, 128, 8, 3), Tile(64, 128, 8, 2), Tile(64, 64, 4, 2)],
    80: [Tile(64, 128, 8, 2), Tile(64, 64, 4, 2)],
    0: [Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)],
}
# Where nothing above fits: small tiles, down to the least that the tensor cores take.
_SMALL = [Tile(32, 32, 4, 2), Tile(32, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1), Tile(16, 16, 4, 1)]
_LEAST = Tile(16, 16, 4, 1)
# fp32 without tensor cores keeps whole operands in registers.
_SMALL_IEEE = [Tile(32, 32, 4, 1), Tile(16, 32, 4, 1), Tile(16, 16, 4, 1)]


def tile_tables(*, bytes_per_element: int, ieee: bool, width_qk: int, width_v: int, heavy: bool) -> TileTables:
    """The tiles of a problem.

    `width_qk` and `width_v` are the padded head dims; `heavy` says that the score costs more registers than a plain
    product does (a transcendental function, a gradient accumulator).
    """

    def table(candidates: dict[int, list[Tile]], resident: str) -> dict[int, Tile]:
        chosen = {}
        for chip, tiles in candidates.items():
            options = _SMALL_IEEE if ieee else tiles + _SMALL
            fitting = (
                t for t in options if _shared(t, resident, bytes_per_element, width_qk + width_v) <= SHARED_MEMORY[chip]
            )
            chosen[chip] = next((t for t in fitting if _in_registers(t, resident, width_qk, width_v)), _LEAST)
        return {chip: t for chip, t in chosen.items() if chip == 0 or t != chosen[0]}

    return TileTables(table(_FORWARD, "m"), table(_DQ, "m"), table(_DKDV, "n"))


def _shared(tile: Tile, resident: str, size: int, width: int) -> int:
    """Bytes of shared memory: the resident rows once, the streamed rows once per stage, one tile of scores."""
    held, streamed = (tile.BLOCK_M, tile.BLOCK_N) if resident == "m" else (tile.BLOCK_N, tile.BLOCK_M)
    return size * (held * width + max(tile.num_stages, 1) * streamed * width + tile.BLOCK_M * tile.BLOCK_N)


def _in_registers(tile: Tile, resident: str, width_qk: int, width_v: int) -> bool:
    """Whether fp32 accumulators and scores take at most about 200 of a thread's 255 registers."""
    rows = tile.BLOCK_M if resident == "m" else tile.BLOCK_N
    widths = max(width_qk, width_v) if resident == "m" else width_qk + width_v
    words = rows * widths + 2 * tile.BLOCK_M * tile.BLOCK_N
    return words / (32 * tile.num_warps) <= 200
