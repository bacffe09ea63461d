"""Tile shapes of linear attention by chip: columns of a head per tile, warps and pipeline stages.

A program always has a whole chunk of rows. Row 0 is for all chips without a row of their own, and
fits into 99 KiB of shared memory. The tiles of states, output, values_back, pairs, pairs_back,
inverse and solve were the fastest on an H200: K = V = 128, 8192 tokens, 32 value heads.
So were the tiles of solve_back without a decay by column, and of decode for 64 and 256 states.
finish and finish_back have 2048 and 4096 numbers. The other rows are the largest tiles that compile
without spills for chunks of 64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from kgen.kernels.linear_attention.plan.planning import LinearAttentionPlan
from kgen.sizes import TILED

RECENT = tuple(chip for chip in TILED if chip >= 90)


@dataclass(frozen=True)
class Tile:
    """A tile shape. Fields that a kernel does not use are None."""

    num_warps: int
    num_stages: int = 1
    BLOCK_K: int | None = None
    """Columns of q and k, or rows of a state."""
    BLOCK_V: int | None = None
    """Columns of v and o."""
    ROWS: int | None = None
    """Rows of a tile that is not a chunk."""

    @property
    def used(self) -> dict[str, int]:
        """The keyword arguments of a launch."""
        return {name: value for name, value in asdict(self).items() if value is not None}


Table = Mapping[int, Tile]
"""Tile shapes by compute capability: 90 for 9.0; 0 for all others."""


def tile_tables(plan: LinearAttentionPlan) -> dict[str, Table]:
    """Return the tile shapes of each kernel of a plan, by the kernel's name."""
    return _forward(plan) | _backward(plan)


def _forward(plan: LinearAttentionPlan) -> dict[str, Table]:
    spec = plan.spec
    BT, k, v = spec.chunk_size, spec.head_dim.qk, spec.head_dim.v
    wide = 8 if BT == 128 else 4
    states = Tile(8 if k == 256 else 4, 1, BLOCK_V=16 if k == 256 else 32)
    stages = 3 if plan.by_column else 4  # decays by column take 48 KiB of shared memory a stage
    if k == 256 or BT == 128:
        stages = 1 if k == 256 and BT == 128 else 2  # two need more than 227 KiB for both
    deep = Tile(states.num_warps, stages, BLOCK_V=32)
    return {
        "gates": {0: Tile(4, BLOCK_K=32)},
        "q_map": {0: Tile(4, ROWS=16)},
        "k_map": {0: Tile(4, ROWS=16)},
        "pairs": {0: Tile(16 if BT == 128 else 4, BLOCK_K=32)},
        "equations": {0: Tile(wide, BLOCK_K=64)},
        "inverse": {0: Tile(8 if BT == 128 else 1)},
        "solve": {0: Tile(wide, BLOCK_K=64, BLOCK_V=64)}
        | dict.fromkeys(RECENT, Tile(wide, BLOCK_K=min(k, 128), BLOCK_V=min(v, 128))),
        "states": {0: states} | dict.fromkeys(RECENT, deep),
        "output": {0: Tile(wide, BLOCK_K=32 if BT == 128 else 64, BLOCK_V=64)}
        | dict.fromkeys(RECENT, Tile(wide, BLOCK_K=min(k, 128), BLOCK_V=64)),
        "finish": {0: Tile(4, ROWS=2048 // v)},
        # 64 numbers of a state per thread. With one warp, sums over keys need no barrier.
        "decode": {0: Tile(max(k // 128, 1), BLOCK_V=max(2048 // k, 16))},
    }


def _backward(plan: LinearAttentionPlan) -> dict[str, Table]:
    spec = plan.spec
    BT, k, v = spec.chunk_size, spec.head_dim.qk, spec.head_dim.v
    wide = 8 if BT == 128 else 4
    states = Tile(8, 1, BLOCK_V=16 if k == 256 else 32)
    deep = Tile(states.num_warps, 1 if k == 256 or BT == 128 else 2, BLOCK_V=32)
    solve = Tile(8, BLOCK_K=64, BLOCK_V=64)
    if BT <= 64 and not plan.by_column:
        solve = Tile(4, BLOCK_K=min(k, 128), BLOCK_V=min(v, 128))
    return {
        "finish_back": {0: Tile(8, ROWS=4096 // v)},
        "values_back": {0: Tile(wide, BLOCK_K=64, BLOCK_V=64)}
        | dict.fromkeys(RECENT, Tile(wide, BLOCK_K=min(k, 128), BLOCK_V=min(v, 128))),
        "states_back": {0: states} | dict.fromkeys(RECENT, deep),
        "keys_back": {0: Tile(8, BLOCK_K=32, BLOCK_V=32)}
        | dict.fromkeys(RECENT, Tile(8, 2, BLOCK_K=64, BLOCK_V=64 if BT <= 64 else 32)),
        "solve_back": {0: Tile(8, BLOCK_K=32, BLOCK_V=32)} | dict.fromkeys(RECENT, solve),
        "updates_back": {0: Tile(8)},
        "pairs_back": {0: Tile(4 if BT == 128 else 2, BLOCK_K=64)},
        "gates_back": {0: Tile(4, BLOCK_K=32)},
        "skip_back": {0: Tile(8)},
        "q_map_back": {0: Tile(8)},
        "k_map_back": {0: Tile(8)},
    }
