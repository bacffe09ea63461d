"""Obligations of the serving kernels.

An item that is not split visits each tile that its rows see. The proofs cover ranges, masks and
scores, not the lookup of pages and the list of items.
"""

from __future__ import annotations

from collections.abc import Iterator

from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.lowered.model import Part, SpanLoops
from kgen.kernels.attention.plan.model import Q_AXIS
from kgen.kernels.attention.prove.loops import Kernel
from kgen.kernels.attention.prove.setting import ALL, Extent, Setting, shapes
from kgen.kernels.attention.schedules.serve.lowering import ServedSpan, ServeKernel, serve_kernel
from kgen.kernels.attention.schedules.serve.plan import of_one_sequence, plan_serve, serves
from kgen.prove.obligations import Obligation
from kgen.spec.load import Loaded
from kgen.targets.code import Name, Statement, assign, row, text


def obligations(loaded: Loaded, extent: Extent = ALL) -> Iterator[Obligation]:
    """Yield the obligations of the serving kernels of a spec."""
    if not serves(loaded):
        return
    plan, one = plan_serve(loaded), of_one_sequence(loaded)
    attention = plan.attention
    kernel = serve_kernel(plan, Lowering(attention))
    tables = [[*plan.few.values()], [*plan.many.values()]]
    for number, blocks in enumerate(extent.shapes(shapes(tables))):
        values = extent.values or number == 0
        yield from Kernel(
            f"serve {blocks[0]}x{blocks[1]}",
            Setting(one, attention, Q_AXIS, blocks, True, False, values),
            attention.forward,
            [*kernel.loop.shared_prologue, *kernel.loop.prologue],
            _spans(kernel),
            kernel.loop.body,
            kernel.loop.store_guard,
        ).obligations()


def _spans(kernel: ServeKernel) -> list[SpanLoops]:
    """Return the loops of an item with all keys of its rows."""
    whole: list[Statement] = [
        *kernel.live_lines,
        assign("begin", text("0")),
        assign("stop", kernel.n_tiles),
    ]
    return [
        SpanLoops([*(whole if at == 0 else []), *span.bounds], _loops(span))
        for at, span in enumerate(kernel.served)
    ]


def _loops(span: ServedSpan) -> list[Part]:
    """Return the loops over an item's part of a span."""
    lo, hi, full_lo, full_hi = (Name(f"kv_{x}") for x in ("lo", "hi", "full_lo", "full_hi"))
    if not span.full:
        return [Part(lo, hi, True)]
    gap = (full_lo, row("sub", full_hi, full_lo))
    return [Part(lo, hi, True, gap=gap), Part(full_lo, full_hi, False)]
