"""What becomes of a chunk_output spec, in words for the person who wrote it."""

from __future__ import annotations

from collections.abc import Iterator

from kgen.expr.show import show
from kgen.kernels.chunk_output.plan.planning import ChunkOutputPlan, bytes_per_token, plan_chunk_output
from kgen.kernels.chunk_output.plan.tiles import tile_tables
from kgen.spec.load import Loaded


def explain_chunk_output(loaded: Loaded, _length: int | None = None) -> str:
    """The decay, what moves through memory, and the tiles, as plain text."""
    plan = plan_chunk_output(loaded)
    sections = {
        "Decay": _decay(plan),
        "Memory": _memory(plan),
        "Gradients": _gradients(plan),
        "Sizes of tiles": _tiles(plan),
    }
    title = f"{plan.spec.name}: {plan.spec.summary.on_terminal()}".rstrip(": ")
    texts = ["\n".join([f"{heading}\n", *lines]) for heading, lines in sections.items()]
    return "\n\n".join([title, *texts]) + "\n"


def _decay(plan: ChunkOutputPlan) -> Iterator[str]:
    if plan.decay is None or plan.exponent is None:
        yield "  None: a pair of tokens counts in full, and so does the state."
        return
    base = plan.spec.gate_base
    yield f"  c(i) = {show(plan.decay)}"
    if plan.exponent != plan.decay:
        yield f"       = {show(plan.exponent)}, with the gates' values at i and h"
    yield f"  The state is multiplied by {base}**c(i), a pair j <= i by {base}**(c(i) - c(j)), subtracted first."
    if plan.natural:
        yield "  Kernels use 2^x in place of e^x: e^x is 2^(LOG2E * x), with LOG2E = log2(e)."


def _memory(plan: ChunkOutputPlan) -> Iterator[str]:
    heads = plan.spec.heads
    h, hv = heads.qk or 1, heads.v or heads.ratio or 1
    yield f"  For each token with H={h} and HV={hv}, every input read once and every output written once:"
    yield f"  forward {bytes_per_token(plan, h, hv):,.0f} bytes"
    if plan.backward:
        yield f"  backward {bytes_per_token(plan, h, hv, backward=True):,.0f} bytes"


def _gradients(plan: ChunkOutputPlan) -> Iterator[str]:
    if not plan.backward:
        yield "  None: `passes` does not ask for backward."
        return
    yield "  Of q, k, v and the states; each value is written by one program, so the bits are the same every time."
    if plan.slope is not None:
        yield f"  Of g: d c / d g = {show(plan.slope)}"
    if "g_gamma" in plan.gates:
        yield "  g_gamma is a constant without a gradient."


def _tiles(plan: ChunkOutputPlan) -> Iterator[str]:
    tables = tile_tables(plan.spec)
    names = {"forward": tables.forward}
    names |= {"dv and dh": tables.dvdh, "dq and dk": tables.dqdk} if plan.backward else {}
    yield "  columns of q and k x columns of v, warps, pipeline stages"
    for kernel, table in names.items():
        for chip, t in sorted(table.items(), reverse=True):
            place = f"sm_{chip}" if chip else "any other chip"
            yield f"  {kernel:<10} {place:<16} {t.BLOCK_K} x {t.BLOCK_V}, {t.num_warps} warps, {t.num_stages} stages"
