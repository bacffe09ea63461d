"""Buffers for which `sorted: true` would let kernels skip tiles."""

from __future__ import annotations

import dataclasses

from kgen.expr.nodes import FIRST_AT_LEAST, reads
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.spec import Buffer
from kgen.spec.load import Loaded

_SIDES = {"SQ", "SK"}


def searchable(loaded: Loaded) -> tuple[str, ...]:
    """Return the buffers of the mask that kernels would search with `sorted: true`."""
    spec = loaded.spec
    mask = loaded.trees.get("mask_mod")
    read = {r.buffer for r in reads(mask)} if mask is not None else set()
    left = {
        name: one.model_copy(update={"sorted": True})
        for name, one in spec.buffers.items()
        if name in read and _could_be_sorted(one)
    }
    if not left:
        return ()
    promised = spec.model_copy(update={"buffers": {**spec.buffers, **left}})
    plan = plan_attention(dataclasses.replace(loaded, spec=promised))
    loops = [loop for loop in (plan.forward, plan.dkdv) if loop is not None]
    bounds = [b for loop in loops for s in loop.spans for b in (s.lo, s.hi, s.full_lo, s.full_hi)]
    names = {r.buffer for bound in bounds for r in reads(bound)}
    return tuple(name for name in left if name + FIRST_AT_LEAST in names)


def _could_be_sorted(buffer: Buffer) -> bool:
    """True for an integer buffer along positions without `sorted: true`."""
    along = bool(buffer.shape) and buffer.shape[-1] in _SIDES
    return along and buffer.dtype in ("int32", "int64") and not buffer.sorted
