"""Obligations of the decoding kernels.

The loops over splits together visit the tiles that a tile of rows sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.lowered.model import Part, SpanLoops
from kgen.kernels.attention.plan.model import Q_AXIS
from kgen.kernels.attention.prove.loops import Kernel
from kgen.kernels.attention.prove.setting import ALL, Extent, Setting, shapes
from kgen.kernels.attention.schedules.decode.lowering import decode_kernel
from kgen.kernels.attention.schedules.decode.plan import DecodePlan, decodes, plan_decode
from kgen.prove.obligations import Obligation
from kgen.prove.statements import Number, Offset, Pointer, Stride
from kgen.prove.world import LONGEST, Buffer
from kgen.spec.load import Loaded
from kgen.targets.code import Statement, assign

TABLE = "block_table"


def obligations(loaded: Loaded, extent: Extent = ALL) -> Iterator[Obligation]:
    """Yield the obligations of the decoding kernels of a spec."""
    if decodes(loaded):
        yield from of_decoding(loaded, plan_decode(loaded), extent)


def of_decoding(loaded: Loaded, plan: DecodePlan, extent: Extent = ALL) -> Iterator[Obligation]:
    """Yield the obligations of the kernel that is split over keys."""
    attention = plan.attention
    kernel = decode_kernel(plan, Lowering(attention))
    loop = kernel.loop
    for number, blocks in enumerate(extent.shapes(shapes([[*plan.tiles.values()]]))):
        values = extent.values or number == 0
        setting = Setting(loaded, attention, Q_AXIS, blocks, True, extent.memory, values)
        pages = _pages(setting, plan.page_size) if plan.page_size is not None else {}
        parts = [Part(*span.ends, attention.forward.masked) for span in kernel.spans]
        mask_lines = [_of_a_row(line) for line in loop.body.mask_lines]
        yield from Kernel(
            f"decode {blocks[0]}x{blocks[1]}",
            setting,
            attention.forward,
            [*loop.shared_prologue, *loop.prologue],
            [SpanLoops(kernel.live_lines, parts)],
            replace(loop.body, mask_lines=[*mask_lines, *kernel.page_lines]),
            loop.store_guard,
            pages,
        ).obligations()


def _of_a_row(line: Statement) -> Statement:
    """Replace the test that some row of a tile sees a key by the test of an arbitrary row.

    A proof for an arbitrary row that sees the key covers all rows.
    """
    return (
        assign("kv_live", "mask") if line.defines == {"kv_live"} and "mask" in line.uses else line
    )


def _pages(setting: Setting, size: int) -> dict[str, Any]:
    """Define the table of pages, at the row of the sequence.

    SK is the number of pages of a row times the page size.
    """
    world = setting.world
    pages = world.integer("pages", 0, LONGEST)
    world.facts.append(setting.names["SK"] == size * pages)
    buffers = {**world.buffers, TABLE: Buffer(("B", "pages"), "int32", ascends=False)}
    world.buffers = buffers
    strides = {f"stride_t{x}": Stride(f"{TABLE}_{d}") for d, x in enumerate("bp")}
    own = Offset(f"{TABLE}_0", Number(setting.names["b"]))
    return {**strides, f"{TABLE}_ptr": Pointer(TABLE, (own,))}
