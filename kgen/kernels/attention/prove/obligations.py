"""The obligations of an attention spec: those of each kernel that its files have, for each size of tile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kgen.kernels.attention.lowered.kernels import accumulators, loop_kernel
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.lowered.model import LoopKernel
from kgen.kernels.attention.plan.extents import without_promises
from kgen.kernels.attention.plan.model import AttentionPlan, TileLoop
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.prove.block_lists import of_lists
from kgen.kernels.attention.prove.loops import Kernel
from kgen.kernels.attention.prove.own_names import apart
from kgen.kernels.attention.prove.setting import ALL, Extent, Setting, shapes
from kgen.kernels.attention.schedules.decode.plan import decodes, plan_decode
from kgen.kernels.attention.schedules.decode.prove import of_decoding
from kgen.kernels.attention.schedules.hopper.prove import of_hopper
from kgen.prove.obligations import Obligation
from kgen.spec.load import Loaded

PAIRS = Extent(memory=False, values=False)
"""Which pairs are computed, and what is computed of them."""


def of_pairs(loaded: Loaded) -> Iterator[Obligation]:
    """What is to be proved before the files of a spec are written: which pairs count, once each, and their scores."""
    return obligations(loaded, PAIRS)


def obligations(loaded: Loaded, extent: Extent = ALL) -> Iterator[Obligation]:
    """What is to be proved of the files of a spec."""
    loaded = apart(loaded)
    decode = plan_decode(loaded) if decodes(loaded) else None
    plan = plan_attention(loaded)
    lowering = Lowering(plan)
    if decode is None or not decode.alone:
        yield from of_loop(loaded, plan, lowering, "forward", plan.forward, plan.tiles.forward, extent)
    if decode is not None:
        yield from of_decoding(loaded, decode, extent)
    if plan.block_mask is not None:
        yield from of_lists(loaded, plan, lowering, extent)
    if plan.dq is not None and plan.dkdv is not None:
        yield from of_loop(loaded, plan, lowering, "dq", plan.dq, plan.tiles.dq, extent)
        yield from of_loop(loaded, plan, lowering, "dkdv", plan.dkdv, plan.tiles.dkdv, extent)
    free = without_promises(loaded)
    yield from of_hopper(loaded, plan if free.spec == loaded.spec else plan_attention(free), extent)


def of_loop(
    loaded: Loaded,
    plan: AttentionPlan,
    lowering: Lowering,
    name: str,
    loop: TileLoop,
    tiles: Mapping[int, Sequence[Any]],
    extent: Extent = ALL,
) -> Iterator[Obligation]:
    """Those of a portable kernel."""
    kernel = loop_kernel(lowering, loop, accumulators(loop))
    for number, blocks in enumerate(extent.shapes(shapes(tiles.values()))):
        values = extent.values or number == 0
        setting = Setting(loaded, plan, loop.outer, blocks, memory=extent.memory, values=values)
        yield from kernel_of(f"{name} {blocks[0]}x{blocks[1]}", setting, loop, kernel).obligations()


def kernel_of(name: str, setting: Setting, loop: TileLoop, kernel: LoopKernel) -> Kernel:
    """A kernel as its template gets it."""
    return Kernel(
        name,
        setting,
        loop,
        [*kernel.shared_prologue, *kernel.prologue, *kernel.ranges.searches],
        kernel.ranges.spans,
        kernel.body,
        kernel.store_guard,
    )
