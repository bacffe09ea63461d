"""How the kernels of a norm go over rows, by chip and width.

Row 90 was timed on an H200 (docs/performance/norm.md), the others are the same, cut to what the chip's shared memory
holds; row 0 is for every other chip.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kgen.kernels.norm.plan.planning import Operand
from kgen.kernels.norm.spec import MAX_WIDTH, NormSpec
from kgen.sizes import SHARED_MEMORY

SIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "int32": 4, "int64": 8, "bool": 1}
"""Bytes of an element."""


@dataclass(frozen=True)
class NormTile:
    """For rows of up to `width` elements: what a program holds at once, and how many programs there are.

    A program takes `elements` at a time: several rows, or a part of one, which is then shared with other programs.
    `programs` run on each multiprocessor and walk over the tiles; 0 makes one program for each tile.
    """

    width: int
    elements: int
    num_warps: int
    STAGES: int
    programs: int


def norm_tiles(spec: NormSpec, pass_: str, loads: Iterable[Operand]) -> dict[int, tuple[NormTile, ...]]:
    """By compute capability (0: any other), for the widths of the spec; `loads` are what the kernel reads."""
    loads = tuple(loads)
    size = sum(SIZES[o.dtype] for o in loads if o.along != "row")
    # An RMS norm of x alone needs the fewest registers for an element.
    tensors = sum(o.along == "element" for o in loads)
    light = spec.norm == "rms" and tensors == {"forward": 1, "backward": 2}[pass_]
    tiles = (_LIGHT if light else _FULL)[pass_]
    if spec.width != "any":
        widths = [spec.width] if isinstance(spec.width, int) else spec.width
        used = {next(t for t in tiles if width <= t.width) for width in widths}
        tiles = tuple(t for t in tiles if t in used)
    return {chip: tuple(_fitted(t, size, limit) for t in tiles) for chip, limit in SHARED_MEMORY.items()}


def _fitted(tile: NormTile, size: int, limit: int) -> NormTile:
    """A tile whose pipelines fit in `limit` bytes of shared memory; an element has `size` bytes in all tensors.

    A pipeline of n stages holds n - 1 tiles.
    """
    limit -= 2048  # sums across warps
    stages = max(s for s in range(1, tile.STAGES + 1) if tile.elements * size * (s - 1) <= limit)
    fits = limit // (tile.elements * size * (stages - 1)) if stages > 1 else tile.programs
    return replace(tile, STAGES=stages, programs=min(tile.programs, fits))


_LIGHT_FORWARD = (
    NormTile(2048, 2048, 4, 1, 0),
    NormTile(4096, 4096, 4, 1, 0),
    NormTile(8192, 8192, 8, 1, 0),
    NormTile(16384, 16384, 16, 2, 2),
    NormTile(MAX_WIDTH, 16384, 16, 3, 1),
)
_FULL_FORWARD = (
    NormTile(1024, 2048, 2, 1, 0),
    NormTile(2048, 2048, 4, 1, 0),
    NormTile(4096, 8192, 8, 1, 0),
    NormTile(8192, 8192, 16, 4, 1),
    NormTile(16384, 16384, 16, 3, 1),
    NormTile(MAX_WIDTH, 8192, 16, 4, 1),
)
_LIGHT_BACKWARD = (
    NormTile(2048, 2048, 4, 3, 3),
    NormTile(4096, 8192, 16, 3, 1),
    NormTile(8192, 8192, 8, 3, 1),
    NormTile(16384, 16384, 32, 3, 1),
    NormTile(131072, 4096, 4, 3, 3),
    NormTile(MAX_WIDTH, 8192, 8, 3, 1),
)
_FULL_BACKWARD = (
    NormTile(1024, 1024, 4, 3, 6),
    NormTile(2048, 2048, 4, 3, 3),
    NormTile(4096, 4096, 8, 3, 2),
    NormTile(8192, 8192, 16, 3, 1),
    NormTile(16384, 2048, 2, 3, 4),
    NormTile(131072, 4096, 4, 3, 2),
    NormTile(MAX_WIDTH, 8192, 8, 3, 1),
)
_LIGHT = {"forward": _LIGHT_FORWARD, "backward": _LIGHT_BACKWARD}
_FULL = {"forward": _FULL_FORWARD, "backward": _FULL_BACKWARD}
