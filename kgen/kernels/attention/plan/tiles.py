"""Tile shapes by chip: how many rows of each side a program takes, and how many warps and pipeline stages it has.

What was timed comes from the table of `tuned.py`; a chip of compute capability 10.0 takes the rows of 9.0. For
the rest there are rules, reasoned from those measurements: lists in order of preference, of which the first tile that
fits is taken. Row 0 serves every other chip: it fits in the 99 KiB of shared memory that the smallest supported parts
give a block. What a tile needs is estimated here, and `kgen compile` holds the estimate against the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from kgen.kernels.attention.plan.tuned import Class, Tile, nearest
from kgen.sizes import KIB, SHARED_MEMORY

LARGEST_TILE = 128
"""The largest tile: lengths that are promised to be a multiple of it need no bounds checks."""


@dataclass(frozen=True)
class TileTables:
    """Tiles by compute capability (90 for 9.0; 0 for any other), for each kernel of attention.

    Of several for a chip the first is taken whose loads the tensors allow; the last one loads by pointers.
    """

    forward: dict[int, tuple[Tile, ...]]
    dq: dict[int, tuple[Tile, ...]]
    dkdv: dict[int, tuple[Tile, ...]]
    pair: dict[int, tuple[Tile, ...]]
    """Of gradients of buffers with an element for each pair."""
    diagonal: dict[int, tuple[Tile, ...]]
    """Of gradients of buffers by distance: square, so that tiles on a diagonal have the same distances."""


@dataclass(frozen=True)
class Problem:
    """What decides on tiles.

    `width_qk` and `width_v` are padded head dims; `ieee` is fp32 without tensor cores, `split` fp32 in several
    tensor-core passes.

    `mask` says how the range of keys moves with a tile of queries: `all` (not at all), `triangle` (one end), `band`
    (both), `search` (it is searched for in a sorted buffer), `listed` (it is a list of blocks), or `scan` where every
    tile computes the mask. `score`
    says what an element costs beside the product: `plain` nothing, `bias` an addition, `function` more, `reads` a
    load. `tile_reads` counts the buffers read for each (query, key). `varlen`: sequences are packed, and a thousand
    tokens long rather than ten thousand.
    """

    element_size: int
    ieee: bool
    split: bool
    width_qk: int
    width_v: int
    mask: str
    score: str
    tile_reads: int
    varlen: bool = False

    @property
    def light(self) -> bool:
        """Most tiles are plain products."""
        return self.mask in ("all", "triangle") and self.score == "plain"

    def timed_as(self, chip: int, kernel: str, loads: str = "any") -> Class:
        """Where the table of timed tiles has this problem."""
        bits, widths = 8 * self.element_size, (self.width_qk, self.width_v)
        return Class(chip, bits, *widths, self.mask, self.score, kernel, loads, self.varlen)


def tile_tables(problem: Problem) -> TileTables:
    """The tiles of a problem for every chip that has a row; a row equal to row 0 is left out."""

    def table(
        kernel: str, tiles: Callable[[Problem, int], list[Tile]], shared: Callable[[Problem, Tile], int]
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
    """Tiles that may be the fastest for `forward`, `dq` or `dkdv`: those whose accumulators and scores fit in registers
    and whose operands fit, by estimate, in shared memory."""
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
            if registers <= 200 and shared(problem, tile) <= SHARED_MEMORY[chip] and (not tma or chip >= 90):
                found.append(tile)
                # A warpgroup multiplies 64 rows at a time: two share them only where registers ask for it.
                if held == 64:
                    break
    return found


# Where nothing better fits, or registers hold operands in parts: down to the least that the tensor cores take.
_SMALL = [Tile(32, 32, 4, 2), Tile(32, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1)]
_LEAST = Tile(16, 16, 4, 1)
# Without tensor cores operands pass through registers.
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
            [Tile(64, 64, 4, 3)] if problem.element_size == 2 else [Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)]
        )
    if problem.element_size == 4 and width <= 128:
        return [Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)]
    if width <= 128:
        return [Tile(128, 128, 8, 3)] * problem.light + [
            Tile(64, 64, 4, 3),
            Tile(64, 64, 4, 2),
            Tile(64, 32, 4, 2),
        ]
    if width <= 256:
        return [Tile(128, 128, 8, 2)] * problem.light + [
            Tile(128, 64, 8, 2),
            Tile(64, 32, 4, 2),
            Tile(64, 32, 4, 1),
        ]
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
        return [Tile(128, 64, 8, 3)] * problem.light + [Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)]
    if width <= 256:
        return [Tile(128, 64, 8, 2)] * (width <= 192) + [
            Tile(128, 32, 8, 2),
            Tile(64, 32, 4, 2),
            Tile(64, 32, 4, 1),
        ]
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
    # Its loop is as long as there are batches, a few: programs that share a multiprocessor hide each other's loads.
    # Before compute capability 9.0 products take their operands from registers, too many of 64 x 64.
    return [Tile(64, 64, 4, 1)] * (chip >= 90) + [Tile(32, 32, 4, 1)]


def _diagonal(problem: Problem, chip: int) -> list[Tile]:
    # Its loop is as long as the sequence: loads go ahead. What it holds of each pair is the sum, S, dP and the bias.
    return [Tile(64, 64, 8, 2), Tile(64, 64, 8, 1)] * (chip >= 90) + [Tile(32, 32, 4, 1)]


# Rows that stream through the pipeline at once, and its stages.
_STREAMS = [(32, 2), (32, 3), (32, 4), (64, 2), (64, 3), (128, 2), (128, 3)]


# Bytes of shared memory: rows that stay, rows that stream through the pipeline, and room for the compiler's own.


def _streamed(problem: Problem, tile: Tile, rows: int) -> int:
    columns = problem.element_size * rows * (problem.width_qk + problem.width_v)
    reads = 4 * problem.tile_reads * tile.BLOCK_M * tile.BLOCK_N
    # Lists of blocks go through the pipeline as well.
    return tile.num_stages * (columns + reads) + (4 if problem.mask == "listed" else 2) * KIB


def _forward_shared(problem: Problem, tile: Tile) -> int:
    return problem.element_size * tile.BLOCK_M * problem.width_qk + _streamed(problem, tile, tile.BLOCK_N)


def _dq_shared(problem: Problem, tile: Tile) -> int:
    held = problem.element_size * tile.BLOCK_M * (problem.width_qk + problem.width_v)
    return held + _streamed(problem, tile, tile.BLOCK_N)


def _dkdv_shared(problem: Problem, tile: Tile) -> int:
    held = problem.element_size * tile.BLOCK_N * (problem.width_qk + problem.width_v)
    return held + _streamed(problem, tile, tile.BLOCK_M)


def _pair_shared(problem: Problem, tile: Tile) -> int:
    rows = tile.BLOCK_M + tile.BLOCK_N
    return problem.element_size * tile.num_stages * rows * (problem.width_qk + problem.width_v) + 2 * KIB
