"""Tile shapes of chunk_output by chip: how many columns of a head a program holds at once, its warps and stages.

A program always has a whole chunk of BT rows. Row 90 follows a sweep on an H200 (docs/performance/chunk_output.md), the
later ones are reasoned from it, and row 0 serves every other chip: it fits in 99 KiB of shared memory.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from kgen.kernels.chunk_output.spec import ChunkOutputSpec
from kgen.sizes import TILED

RECENT = tuple(chip for chip in TILED if chip >= 90)


@dataclass(frozen=True)
class Tile:
    """Columns of q and k (and rows of a state), columns of v and o, warps, and the depth of the load pipeline."""

    BLOCK_K: int
    BLOCK_V: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None
    """Registers of a thread at most, where that was faster: what the compiler does with more is not always better."""

    @property
    def spelled(self) -> str:
        """As keyword arguments of a launch."""
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items() if value is not None)


@dataclass(frozen=True)
class TileTables:
    """Tiles by compute capability (90 for 9.0; 0 for any other), for each kernel of chunk_output."""

    forward: dict[int, Tile]
    dvdh: dict[int, Tile]
    dqdk: dict[int, Tile]


def tile_tables(spec: ChunkOutputSpec) -> TileTables:
    """The tiles of a spec."""
    BT, k, v = spec.chunk_size, spec.head_dim.qk, spec.head_dim.v
    warps = 8 if BT == 128 else 4
    small = {0: Tile(32 if BT == 128 else min(k, 64), 64, warps, 1)}
    # A program that has all columns of v reads q and k once; halves of K overlap their products with loads.
    halves = Tile(min(k, 64), min(v, 128), warps, 1)
    # All of K at once, where the accumulators leave room for it.
    whole = Tile(min(k, 128), min(v, 128), warps, 1) if BT <= 64 else halves
    # Four warps would spill the accumulators of dq and dk. Narrow blocks of v leave shared memory for many.
    deep = Tile(min(k, 128 if BT <= 64 else 64), 32, 8, 5)
    forward = dict.fromkeys(RECENT, halves) | {90: replace(halves, maxnreg=240 if warps == 4 else None)}
    return TileTables(
        forward=small | forward,
        dvdh=small | dict.fromkeys(RECENT, whole),
        dqdk=small | dict.fromkeys(RECENT, deep),
    )
