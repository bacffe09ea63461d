"""Which forward passes have a kernel for Hopper alone, and its tile: warp-specialised, asynchronous products.

The kernel is made for heads of 128 columns of 16 bits: two consumers of 64 queries each hold an accumulator of 64
registers a thread and scores of as many, and one K and V tile for both goes through shared memory. Other widths, and
whatever TMA cannot load or must not (rows that only the mask hides may hold NaN), keep the kernel for every chip.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.plan.attention import AttentionPlan

WIDTH = 128
ROWS = 128
"""Queries of a tile, 64 for each consumer."""


@dataclass(frozen=True)
class HopperTile:
    """Keys of a tile, how many tiles of K and V together shared memory holds, and registers a thread of the second
    consumer and of the producer; the first consumer has what the two leave of 504."""

    BLOCK_N: int
    SLOTS: int
    consumer_registers: int
    producer_registers: int
    dynamic: bool
    """Whether programs take tiles from a counter: where some tiles take longer than others."""


def hopper_tile(plan: AttentionPlan) -> HopperTile | None:
    """The tile of the forward kernel for Hopper; None where there is no such kernel."""
    spec, loop = plan.spec, plan.forward
    made_for = spec.dtype in ("bf16", "fp16") and spec.head_dim.qk == spec.head_dim.v == WIDTH
    hidden = plan.kv.live != plan.kv.bound or plan.q.live != plan.q.bound
    elsewhere = spec.varlen or spec.paged_kv is not None or loop.listed or len(loop.spans) != 1
    if not made_for or hidden or elsewhere or plan.problem.score == "reads":
        return None
    mask, searches = plan.problem.mask, plan.problem.mask == "search"
    # Ends of a range are masked, so short ranges want short tiles. Searching takes the producer's registers.
    keys, slots = (128, 4) if mask in ("all", "triangle") else (64, 8)
    lean = searches or (mask == "triangle" and plan.problem.score == "plain")
    return HopperTile(keys, slots, *((232, 40) if lean else (240, 24)), dynamic=mask != "all")
