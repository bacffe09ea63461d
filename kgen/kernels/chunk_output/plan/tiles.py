"""Tile shapes of chunk_output by chip: columns of a head per tile, warps and pipeline stages.

A program always has a whole chunk of BT rows. Row 90 is the result of a sweep on an H200
(docs/performance/chunk_output.md). Rows of later chips are derived from it without measurements.
Row 0 is for all other chips and fits into 99 KiB of shared memory.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from kgen.kernels.chunk_output.spec import ChunkOutputSpec
from kgen.sizes import TILED

RECENT = tuple(chip for chip in TILED if chip >= 90)


@dataclass(frozen=True)
class Tile:
    """A tile shape: columns of q and k (rows of a state), columns of v and o, warps, and pipeline
    stages.
    """

    BLOCK_K: int
    BLOCK_V: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None
    """The most registers of a thread, if a limit was faster in measurements."""

    @property
    def spelled(self) -> str:
        """The keyword arguments of a launch."""
        return ", ".join(
            f"{name}={value}" for name, value in asdict(self).items() if value is not None
        )


@dataclass(frozen=True)
class TileTables:
    """Tile shapes of each kernel, by compute capability (90 for 9.0; 0 for all others)."""

    forward: dict[int, Tile]
    dvdh: dict[int, Tile]
    dqdk: dict[int, Tile]


def tile_tables(spec: ChunkOutputSpec) -> TileTables:
    """Return the tile shapes of a spec."""
    BT, k, v = spec.chunk_size, spec.head_dim.qk, spec.head_dim.v
    warps = 8 if BT == 128 else 4
    small = {0: Tile(32 if BT == 128 else min(k, 64), 64, warps, 1)}
    # A program with all columns of v reads q and k once. With halves of K, products overlap loads.
    halves = Tile(min(k, 64), min(v, 128), warps, 1)
    # All of K at once, if the accumulators leave enough registers.
    whole = Tile(min(k, 128), min(v, 128), warps, 1) if BT <= 64 else halves
    # Four warps would spill the accumulators of dq and dk. Narrow blocks of v leave shared memory
    # for many stages.
    deep = Tile(min(k, 128 if BT <= 64 else 64), 32, 8, 5)
    forward = dict.fromkeys(RECENT, halves) | {
        90: replace(halves, maxnreg=240 if warps == 4 else None)
    }
    return TileTables(
        forward=small | forward,
        dvdh=small | dict.fromkeys(RECENT, whole),
        dqdk=small | dict.fromkeys(RECENT, deep),
    )
