"""The obligations of the portable kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kgen.kernels.attention.lowered.kernels import accumulators, loop_kernel
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.plan.model import AttentionPlan, TileLoop
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.prove.loops import kernel_of
from kgen.kernels.attention.prove.setting import ALL, Extent, Setting, shapes
from kgen.kernels.attention.schedules.portable.conditions import takes_many_queries
from kgen.prove.obligations import Obligation
from kgen.spec.load import Loaded


def obligations(loaded: Loaded, extent: Extent = ALL) -> Iterator[Obligation]:
    """Yield the obligations of the portable kernels that loop over tiles."""
    plan = plan_attention(loaded)
    lowering = Lowering(plan)
    if takes_many_queries(plan.spec):
        yield from of_loop(
            loaded, plan, lowering, "forward", plan.forward, plan.tiles.forward, extent
        )
    if plan.dq is not None and plan.dkdv is not None:
        yield from of_loop(loaded, plan, lowering, "dq", plan.dq, plan.tiles.dq, extent)
        yield from of_loop(loaded, plan, lowering, "dkdv", plan.dkdv, plan.tiles.dkdv, extent)


def of_loop(
    loaded: Loaded,
    plan: AttentionPlan,
    lowering: Lowering,
    name: str,
    loop: TileLoop,
    tiles: Mapping[int, Sequence[Any]],
    extent: Extent = ALL,
) -> Iterator[Obligation]:
    """Yield the obligations of one portable kernel."""
    kernel = loop_kernel(lowering, loop, accumulators(loop))
    for number, blocks in enumerate(extent.shapes(shapes(tiles.values()))):
        values = extent.values or number == 0
        setting = Setting(loaded, plan, loop.outer, blocks, memory=extent.memory, values=values)
        yield from kernel_of(f"{name} {blocks[0]}x{blocks[1]}", setting, loop, kernel).obligations()
