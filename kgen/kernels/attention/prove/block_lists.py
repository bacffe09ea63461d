"""Obligations of the kernel that builds a block mask: skipped blocks, full blocks, and its mask of
pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import z3

from kgen.kernels.attention.lowered.block_mask import block_mask_kernel
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.plan.block_mask import BLOCK_SIZE
from kgen.kernels.attention.plan.model import Q_AXIS, AttentionPlan
from kgen.kernels.attention.prove.claims import INT32, LOADS, MASK, ONCE, SKIPPED, WHOLE
from kgen.kernels.attention.prove.list_order import each_block_once
from kgen.kernels.attention.prove.loops import in_32_bits, loads_inside, masks
from kgen.kernels.attention.prove.setting import ALL, Extent, Setting
from kgen.prove.functions import Beyond
from kgen.prove.obligations import Obligation
from kgen.prove.trees import term
from kgen.spec.load import Loaded
from kgen.targets.code import Code, Name

NAME = f"block mask {BLOCK_SIZE}x{BLOCK_SIZE}"


def of_lists(
    loaded: Loaded, plan: AttentionPlan, lowering: Lowering, extent: Extent = ALL
) -> Iterator[Obligation]:
    """Yield the obligations of the kernel that classifies each block."""
    assert plan.block_mask is not None
    decision = plan.block_mask.decision
    kernel = block_mask_kernel(plan.block_mask, lowering)
    setting = Setting(loaded, plan, Q_AXIS, (BLOCK_SIZE, BLOCK_SIZE))
    world, names = setting.world, setting.names
    number = world.integer("block", 0)
    count = (names["SK"] + BLOCK_SIZE - 1) / BLOCK_SIZE
    lane, start = setting.lane, BLOCK_SIZE * number
    q, kv = names["q_idx"], start + lane
    row = z3.Int("row")
    world.facts += [number < count, lane >= 0, lane < BLOCK_SIZE]
    # These facts follow from the others. They save z3 the search.
    world.facts += [row / BLOCK_SIZE == 0, lane / BLOCK_SIZE == 0]
    world.shown["kv_idx"] = kv
    machine = setting.machine().given(
        kv_start=start, kv_idx=kv, blocks=number, kv_blocks=count, BLOCK_SIZE=z3.IntVal(BLOCK_SIZE)
    )
    machine.vectors = (row, lane)
    pairs = machine.copy().run(kernel.pair_lines)
    machine.run([*kernel.rows, *kernel.columns])
    world.facts += setting.promises
    exists = z3.And(q < names["SQ"], kv < names["SK"])
    allowed = z3.And(exists, setting.allowed(q, kv))

    def stated(what: str, claim: Any = lambda: None, parts: Any = lambda: ()) -> Obligation:
        try:
            found, several = claim(), parts()
        except Beyond as beyond:
            return Obligation(NAME, what, beyond=str(beyond))
        return Obligation(NAME, what, found, list(world.facts), dict(world.shown), parts=several)

    def decided(value: Code | bool) -> Any:
        return machine.value(value) if isinstance(value, Code) else z3.BoolVal(value)

    def whole() -> Any:
        possible = z3.And(exists, setting.possible(q, kv))
        return z3.Implies(z3.And(decided(kernel.possible), decided(kernel.certain)), possible)

    def some() -> Any:
        known = {**names, "kv_start": start, "kv_idx": kv}
        for binding in decision.bindings:
            with suppress(Beyond):
                known[binding.name] = machine.value(Name(binding.name))
        return term(world, decision.results["some"], known)

    yield each_block_once(NAME, ONCE)
    yield stated(SKIPPED, lambda: z3.Implies(allowed, decided(kernel.possible)))
    yield stated(WHOLE, whole)
    # The kernel evaluates pairs only in blocks that may be partial.
    yield stated(
        MASK, lambda: z3.Implies(some(), masks(setting, pairs.value(kernel.mask), exists, (q, kv)))
    )
    yield stated(LOADS, parts=lambda: loads_inside([*machine.loads, *pairs.loads]))
    if extent.memory:
        yield stated(INT32, parts=lambda: in_32_bits([*machine.computed, *pairs.computed]))
