"""Tile shapes of norms in Triton, by chip and width.

The shapes were timed on an H200 (docs/performance/norm.md). Chips with less shared memory have
fewer pipeline stages and programs. Row 0 is for all other chips.
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
    """The tile shape for rows of up to `width` elements.

    A tile has `elements` elements: several rows, or a part of a row that several programs share.
    `programs` is the number of programs per multiprocessor, which loop over the tiles; 0 means one
    program per tile.
    """

    width: int
    elements: int
    num_warps: int
    STAGES: int
    programs: int


def norm_tiles(
    spec: NormSpec, pass_: str, loads: Iterable[Operand]
) -> dict[int, tuple[NormTile, ...]]:
    """Return tile shapes by compute capability (0 for all others), for the widths of the spec.

    `loads` are the operands that the kernel of `pass_` loads.
    """
    loads = tuple(loads)
    size = sum(SIZES[o.dtype] for o in loads if o.along != "row")
    # An RMS norm that loads only x (and dout) needs the fewest registers per element.
    tensors = sum(o.along == "element" for o in loads)
    light = spec.norm == "rms" and tensors == {"forward": 1, "backward": 2}[pass_]
    tiles = (_LIGHT if light else _FULL)[pass_]
    if spec.width != "any":
        widths = [spec.width] if isinstance(spec.width, int) else spec.width
        used = {next(t for t in tiles if width <= t.width) for width in widths}
        tiles = tuple(t for t in tiles if t in used)
    return {
        chip: tuple(_fitted(t, size, limit) for t in tiles) for chip, limit in SHARED_MEMORY.items()
    }


def _fitted(tile: NormTile, size: int, limit: int) -> NormTile:
    """Reduce stages and programs so that the pipelines fit into `limit` bytes of shared memory.

    `size` is the number of bytes of an element in all tensors. A pipeline of n stages holds n - 1
    tiles.
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
