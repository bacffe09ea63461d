"""Tile shapes by chip: rows of queries and of keys, warps, and pipeline stages.

The table of `tuned.py` has the tiles that `kgen tune` timed. Compute capability 10.0 uses the rows
of 9.0. For other problems, rules derived from the timings list tiles by preference, and the first
that fits is chosen. Row 0 is for all other chips: it fits in 99 KiB of shared memory, the least per
block of a supported chip. This module estimates the shared memory of a tile, and `kgen compile`
checks the estimate against the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from kgen.kernels.attention.plan.tuned import Class, Tile, nearest
from kgen.sizes import KIB, SHARED_MEMORY

LARGEST_TILE = 128
"""Rows of the largest tile. A length that is a promised multiple of it needs no bounds checks."""


@dataclass(frozen=True)
class TileTables:
    """Tiles of each kernel by compute capability (90 for 9.0; 0 for any other).

    If a chip has several, the launcher takes the first whose loads the tensors allow. The last one
    loads by pointers.
    """

    forward: dict[int, tuple[Tile, ...]]
    dq: dict[int, tuple[Tile, ...]]
    dkdv: dict[int, tuple[Tile, ...]]
    pair: dict[int, tuple[Tile, ...]]
    """Tiles for gradients of buffers with an element per pair."""
    diagonal: dict[int, tuple[Tile, ...]]
    """Tiles for gradients of buffers by distance. They are square, so that tiles on a diagonal have
    equal distances.
    """


@dataclass(frozen=True)
class Problem:
    """The properties of a spec that select tile shapes.

    `mask` is how the range of keys moves with a tile of queries:

    | value | range |
    |---|---|
    | `all` | does not move |
    | `triangle` | one end moves |
    | `band` | both ends move |
    | `search` | is a search in a sorted buffer |
    | `listed` | is a list of blocks |
    | `scan` | every tile evaluates the mask |

    `score` is the cost of an element in addition to the product:

    | value | cost |
    |---|---|
    | `plain` | none |
    | `bias` | an addition |
    | `function` | more than an addition |
    | `reads` | a load |
    """

    element_size: int
    """Bytes of an element of Q, K and V."""
    ieee: bool
    """True for fp32 without tensor cores."""
    split: bool
    """True for fp32 in several passes of the tensor cores."""
    width_qk: int
    """Padded columns of Q and K."""
    width_v: int
    """Padded columns of V."""
    mask: str
    score: str
    tile_reads: int
    """4-byte words per (query, key) that the pipeline loads from buffers."""
    varlen: bool = False
    """True for packed sequences, which are assumed to have about 1000 tokens instead of 10 000."""

    @property
    def light(self) -> bool:
        """True if most tiles are products without other work."""
        return self.mask in ("all", "triangle") and self.score == "plain"

    def timed_as(self, chip: int, kernel: str, loads: str = "any") -> Class:
        """Return the class of this problem in the table of timed tiles."""
        bits, widths = 8 * self.element_size, (self.width_qk, self.width_v)
        return Class(chip, bits, *widths, self.mask, self.score, kernel, loads, self.varlen)


def tile_tables(problem: Problem) -> TileTables:
    """Return the tiles of a problem for every chip, without the rows that equal row 0."""

    def table(
        kernel: str,
        tiles: Callable[[Problem, int], list[Tile]],
        shared: Callable[[Problem, Tile], int],
    ) -> dict[int, tuple[Tile, ...]]:
        def best(chip: int, loads: str) -> Tile:
            timed = nearest(problem.timed_as(min(chip, 90), kernel, loads)) if chip >= 90 else None
            ruled = [] if problem.split else tiles(problem, chip)
            options = _IEEE if problem.ieee else [*([timed] if timed else []), *ruled, *_SMALL]
            return next((t for t in options if shared(problem, t) <= SHARED_MEMORY[chip]), _LEAST)

        chosen: dict[int, tuple[Tile, ...]] = {}
        for chip in SHARED_MEMORY:
            tile = best(chip, "any")
            chosen[chip] = (tile, best(chip, "pointers")) if tile.TMA else (tile,)
        return {chip: tile for chip, tile in chosen.items() if chip == 0 or tile != chosen[0]}

    return TileTables(
        forward=table("forward", _forward, _forward_shared),
        dq=table("dq", _dq, _dq_shared),
        dkdv=table("dkdv", _dkdv, _dkdv_shared),
        pair=table("pair", _pair, _pair_shared),
        diagonal=table("diagonal", _diagonal, _pair_shared),
    )


def candidates(problem: Problem, kernel: str, chip: int) -> list[Tile]:
    """Return the tiles of `forward`, `dq` or `dkdv` that `kgen tune` should time.

    The accumulators and scores of a candidate fit in registers, and its operands fit in shared
    memory, both by estimate.
    """
    estimates: dict[str, tuple[Callable[[Tile], int], int, Callable[[Problem, Tile], int]]] = {
        "forward": (lambda t: t.BLOCK_M * problem.width_v, 1, _forward_shared),
        "dq": (lambda t: t.BLOCK_M * problem.width_qk, 2, _dq_shared),
        "dkdv": (lambda t: t.BLOCK_N * (problem.width_qk + problem.width_v), 2, _dkdv_shared),
    }
    accumulated, scores, shared = estimates[kernel]
    found = []
    for held, (streamed, stages), tma in product((64, 128), _STREAMS, (True, False)):
        rows = (streamed, held) if kernel == "dkdv" else (held, streamed)
        for num_warps in (4, 8):
            tile = Tile(*rows, num_warps, stages, tma)
            registers = (accumulated(tile) + scores * held * streamed) // (32 * num_warps)
            if (
                registers <= 200
                and shared(problem, tile) <= SHARED_MEMORY[chip]
                and (not tma or chip >= 90)
            ):
                found.append(tile)
                # A warpgroup multiplies 64 rows at a time. Two warpgroups share 64 rows only to
                # save registers.
                if held == 64:
                    break
    return found


# For problems where no better tile fits, down to the smallest operands of the tensor cores.
_SMALL = [Tile(32, 32, 4, 2), Tile(32, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1)]
_LEAST = Tile(16, 16, 4, 1)
# Without tensor cores, operands pass through registers.
_IEEE = [Tile(32, 32, 4, 1), Tile(16, 32, 4, 1)]


def _forward(problem: Problem, chip: int) -> list[Tile]:
    width = max(problem.width_qk, problem.width_v)
    if chip == 0:
        return [Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)] if width <= 256 else []
    if chip == 80:
        wide = (
            [Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)]
            if width <= 256
            else [Tile(32, 32, 8, 2), Tile(32, 32, 8, 1)]
        )
        return [Tile(128, 64, 8, 2), *wide] if width <= 128 else wide
    if width <= 64:
        return (
            [Tile(64, 64, 4, 3)]
            if problem.element_size == 2
            else [Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)]
        )
    if problem.element_size == 4 and width <= 128:
        return [Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)]
    if width <= 128:
        small = [Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)]
        return [Tile(128, 128, 8, 3), *small] if problem.light else small
    if width <= 256:
        small = [Tile(128, 64, 8, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)]
        return [Tile(128, 128, 8, 2), *small] if problem.light else small
    return [Tile(64, 32, 8, 2), Tile(64, 32, 8, 1)]


def _dq(problem: Problem, chip: int) -> list[Tile]:
    width = max(problem.width_qk, problem.width_v)
    if chip == 0:
        return [Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)] if width <= 128 else []
    if chip == 80:
        return [Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)] if width <= 128 else []
    if problem.element_size == 4:
        return (
            [Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)]
            if width <= 64
            else [Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)]
        )
    if width <= 64:
        return [Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)]
    if width <= 128:
        small = [Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)]
        return [Tile(128, 64, 8, 3), *small] if problem.light else small
    if width <= 256:
        small = [Tile(128, 32, 8, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)]
        return [Tile(128, 64, 8, 2), *small] if width <= 192 else small
    return [Tile(64, 32, 8, 1), Tile(32, 32, 8, 1)]


def _dkdv(problem: Problem, chip: int) -> list[Tile]:
    width = max(problem.width_qk, problem.width_v)
    if chip == 0:
        return [Tile(32, 64, 4, 2), Tile(32, 64, 4, 1)] if width <= 128 else []
    if chip == 80:
        return [Tile(32, 64, 4, 2)] if width <= 128 else []
    if problem.element_size == 4:
        return (
            [Tile(64, 128, 8, 2), Tile(32, 64, 4, 2)]
            if width <= 64
            else [Tile(32, 64, 4, 2), Tile(32, 64, 4, 1)]
        )
    if width <= 64:
        return [Tile(32, 128, 4, 3), Tile(32, 64, 4, 2)]
    if width <= 128:
        return [Tile(32, 64, 4, 3), Tile(32, 64, 4, 2)]
    if width <= 192:
        return [Tile(32, 128, 8, 3), Tile(32, 64, 4, 2)]
    if width <= 256:
        return [Tile(32, 64, 8, 3), Tile(32, 64, 8, 2)]
    return [Tile(32, 32, 8, 2), Tile(32, 32, 8, 1)]


def _pair(problem: Problem, chip: int) -> list[Tile]:
    # The loop over batches is short, so other programs of the multiprocessor must hide the latency
    # of loads. Before compute capability 9.0, operands of products are in registers, and 64 x 64
    # needs too many.
    small = Tile(32, 32, 4, 1)
    return [Tile(64, 64, 4, 1), small] if chip >= 90 else [small]


def _diagonal(problem: Problem, chip: int) -> list[Tile]:
    # The loop is as long as the sequence, so the pipeline hides loads. Registers per pair: the sum,
    # S, dP and the bias.
    small = Tile(32, 32, 4, 1)
    return [Tile(64, 64, 8, 2), Tile(64, 64, 8, 1), small] if chip >= 90 else [small]


# Rows per pipeline stage, and number of stages.
_STREAMS = [(32, 2), (32, 3), (32, 4), (64, 2), (64, 3), (128, 2), (128, 3)]


# Bytes of shared memory: rows that stay, rows that stream through the pipeline, and room for the
# compiler.


def _streamed(problem: Problem, tile: Tile, rows: int) -> int:
    columns = problem.element_size * rows * (problem.width_qk + problem.width_v)
    reads = 4 * problem.tile_reads * tile.BLOCK_M * tile.BLOCK_N
    # The lists of blocks also use pipeline stages.
    return tile.num_stages * (columns + reads) + (4 if problem.mask == "listed" else 2) * KIB


def _forward_shared(problem: Problem, tile: Tile) -> int:
    return problem.element_size * tile.BLOCK_M * problem.width_qk + _streamed(
        problem, tile, tile.BLOCK_N
    )


def _dq_shared(problem: Problem, tile: Tile) -> int:
    held = problem.element_size * tile.BLOCK_M * (problem.width_qk + problem.width_v)
    return held + _streamed(problem, tile, tile.BLOCK_N)


def _dkdv_shared(problem: Problem, tile: Tile) -> int:
    held = problem.element_size * tile.BLOCK_N * (problem.width_qk + problem.width_v)
    return held + _streamed(problem, tile, tile.BLOCK_M)


def _pair_shared(problem: Problem, tile: Tile) -> int:
    rows = tile.BLOCK_M + tile.BLOCK_N
    return (
        problem.element_size * tile.num_stages * rows * (problem.width_qk + problem.width_v)
        + 2 * KIB
    )
