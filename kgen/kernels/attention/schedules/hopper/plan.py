"""Which passes have kernels for Hopper alone, and with what tiles: warp-specialised, TMA and asynchronous products.

The kernels are made for heads of 128 columns of 16 bits: two consumers of 64 rows each hold accumulators of 64
registers a thread and scores of as many, and what streams past both goes through shared memory once. Heads of 64 have
half of the accumulators, so forward has three consumers, and dk and dv keep K and V in registers. Of heads of 256
each consumer of dk and dv has one of them, and what one computes and the other wants goes through shared memory.
So it is of keys of 192 columns with values of 128 (latent attention), whose last 64 are tiles of their own, and a
second product. Heads of fewer columns have tiles of the next width, filled up with zeros. What they ask of a plan is in
`conditions.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kgen.expr.algebra import LOG2E, Algebra
from kgen.expr.differentiate import is_one
from kgen.expr.hoist import TILE, Binding
from kgen.expr.nodes import Call, Const, Node, Type, Var, substitute, variables, walk
from kgen.expr.softmax_form import QK
from kgen.kernels.attention.plan.idioms import Idioms, documents, linear_bias, linear_rest
from kgen.kernels.attention.plan.model import AttentionPlan, TileLoop
from kgen.kernels.attention.schedules.hopper.conditions import (
    WIDE,
    WIDTHS,
    has_rope_dims,
    pair_of,
    width_of,
    without_kernels,
)

HALF = 64
"""Rows of a tile that each consumer has: as many as a warpgroup multiplies at a time."""


PAIR_ROOM = 2**16
"""Bytes of shared memory for its tiles."""

ROOM, MOST = 64, 80
"""Powers of two of bounded logits are 2^64 at most, which leaves room in bf16 and fp32 for sums of 2^20 of them with
values of up to 2^40. With bounds of up to 80 those of a row's first tile are 2^-98 at least."""


@dataclass(frozen=True)
class HopperTile:
    """Queries and keys of a tile, how many tiles of what streams shared memory holds (K and V together, or Q and dO),
    and registers a thread of every consumer but the first and of the producer; the first has what they leave
    of 504, or of 512 with three consumers."""

    BLOCK_M: int
    BLOCK_N: int
    SLOTS: int
    consumer_registers: int = 240
    producer_registers: int = 24
    fewer_values: int = 0
    """Of forward: how many tiles of V there are less than of K, which is wanted first."""
    least: int | None = None
    """Of forward: where the maximum of a row's first tile is taken from all of its logits, the least that is, or up to
    one more. None where the maximum is followed."""
    consumers: int = 2
    """Of forward: how many have 64 queries each. Three fill each other's gaps, and none has registers for two tiles at
    a time: they take the keys of a tile in two halves."""
    out_fills_registers: bool = False
    """Of forward: whether out is 128 registers of a consumer's, and Q is too much to have there as well."""
    out_in_halves: bool = False
    """Of forward: whether there is room for half of the columns of out at a time."""
    halves: bool = False
    """Of dk and dv: whether queries of a tile are taken in two halves, the second's scores in flight while the
    first's softmax runs; K and V are in registers."""

    @property
    def chained(self) -> bool:
        """Of forward: whether the values of a tile meet P while the next one's softmax runs."""
        return self.consumers == 2

    @property
    def bounded(self) -> bool:
        """Of forward: whether the maximum of a row's first tile is taken from all of its logits."""
        return self.least is not None

    @property
    def seldom_rescaled(self) -> bool:
        """Of forward: whether what is taken from a row's logits may stay up to 8 below their maximum, and what is
        accumulated is multiplied only by warps that have a row where it moved."""
        return self.chained and not self.bounded

    @property
    def queries_in_registers(self) -> bool:
        """Of forward: a product of 64 x 64 reads both operands from shared memory no faster than it multiplies them.
        And Q leaves its slot at once, to the next."""
        return not self.out_fills_registers and (self.BLOCK_N == HALF or not self.chained)


NARROW_FORWARD = HopperTile(3 * HALF, 128, 4, 160, 32, consumers=3)
"""Of heads of 64."""


@dataclass(frozen=True)
class HopperPlan:
    """The kernels for Hopper of one plan: each where it was faster than the portable kernel. That of dq is only
    there beside the others."""

    forward: HopperTile | None
    dq: HopperTile | None
    dkdv: HopperTile | None
    fused: HopperTile | None
    """Of dq, dk and dv in one kernel, beside those of dq and of dk and dv, which have one order of summation."""
    # The producer takes the next number after the last loads of its tile. Taken earlier, it leaves
    # the last tiles to few programs: 3 to 10 % slower for causal masks.
    dynamic: bool
    """Whether programs take tiles from a counter: where some tiles, or sequences, take longer than others."""
    # TMA loads these keys, and they may be NaN. Rows of V are cleared in shared memory, because 0 *
    # NaN is NaN.
    hidden_keys: bool
    """Whether keys past an end that only the mask knows may be in a tile."""
    hidden_scores: bool
    """True if the scores of such keys have to be numbers: scores that share a reciprocal would share a NaN."""
    pair: Binding | None
    """Of forward: what it reads for each pair of a query and a key."""
    page_rows: int | None
    """Of forward, where keys are in pages: how many of a tile TMA loads at a time, all of a page or of the tile."""
    width: int
    """Columns of a tile of V, and of Q and K but for their rope dims: TMA makes zeros of those that heads lack."""
    rope: int
    """Columns of Q and K past those of V: the rope dims of multi-head latent attention."""
    idioms: Mapping[str, Idioms]
    """Of the loops over keys, of forward and of dq."""
    rest_slope: Node | None
    """In dk and dv, the slope of the term that the log-sum-exp gets back, if that is linear in the query."""
    heads: int
    """Heads that forward takes at a time, at least: many of short ranges share L2, and what is heavy begins earlier."""

    @property
    def dq_rings_apart(self) -> bool:
        """True if dq has K and V in rings of their own: for such wide heads there is room for one tile of V."""
        return self.width == WIDE

    @property
    def split_dkdv(self) -> bool:
        """Whether one consumer has dv, and the other dk."""
        return self.width == WIDE or self.rope > 0

    @property
    def least_keys(self) -> int:
        """From how many keys on one backward kernel was ahead of two that run side by side."""
        return 2560 if self.dynamic else 1024


def plan_hopper(plan: AttentionPlan) -> HopperPlan | None:
    """The kernels for Hopper; None where there are none."""
    missing = without_kernels(plan)
    backward = plan.backward and "backward" not in missing
    if "forward" in missing and not backward:
        return None
    hidden = plan.kv.live != plan.kv.bound
    width, mask, varlen = width_of(plan), plan.problem.mask, plan.problem.varlen
    assert width is not None
    narrow, pair, pages = width < max(WIDTHS), pair_of(plan), plan.spec.paged_kv
    forward = None if "forward" in missing else NARROW_FORWARD if narrow else _forward_tile(plan, pair)
    begins_anywhere = (
        plan.self_attention
        and pair is None
        and pages is None
        and not (hidden or varlen or plan.forward.listed)
    )
    over_keys = {"forward": plan.forward} | ({"dq": plan.dq} if plan.dq is not None else {})
    return HopperPlan(
        forward=forward,
        dq=_dq_tile(plan, width) if backward and not narrow else None,
        dkdv=_dkdv_tile(plan, width) if backward else None,
        fused=HopperTile(HALF, 2 * HALF, 3) if backward and not narrow and _fused(plan) else None,
        dynamic=mask != "all" or varlen or hidden,
        hidden_keys=hidden,
        hidden_scores=hidden and _shares_reciprocals(plan.forward),
        pair=pair,
        idioms={name: _idioms(plan, loop, begins_anywhere) for name, loop in over_keys.items()},
        page_rows=min(pages.page_size, forward.BLOCK_N)
        if pages is not None and forward is not None
        else None,
        width=width,
        rope=plan.spec.head_dim.qk - plan.spec.head_dim.v,
        rest_slope=linear_rest(plan.dkdv) if plan.dkdv is not None and plan.form.finite else None,
        heads=16 if mask == "search" else 1,
    )


def _shares_reciprocals(loop: TileLoop) -> bool:
    """True if scores have a tanh: several of them share one reciprocal."""
    results = (node for name in ("core", "bias") if (node := loop.program.results.get(name)) is not None)
    made = (b.node for b in loop.program.in_loop(without=("mask", "inner_live")))
    return any(isinstance(n, Call) and n.fn == "tanh" for node in (*results, *made) for n in walk(node))


def _idioms(plan: AttentionPlan, loop: TileLoop, begins_anywhere: bool) -> Idioms:
    """The product begins with a bias where scores are multiplied by a positive number alone; documents are searched for
    where tiles of keys may begin at any key."""
    scaled = plan.form.core == QK and plan.form.positive
    return Idioms(linear_bias(loop) if scaled else None, documents(loop) if begins_anywhere else None)


def _forward_tile(plan: AttentionPlan, pair: Binding | None) -> HopperTile:
    mask = plan.problem.mask
    # Ends of a range are masked, so short ranges want short tiles.
    keys, slots, fewer = (128, 3, 1) if mask in ("all", "triangle") else (64, 5, 0)
    if pair is not None:
        keys, slots, fewer = 64, 3, 0  # what is read for each pair has the room of two more
    fills, roped = width_of(plan) == WIDE, has_rope_dims(plan)
    if roped:
        slots, fewer = (2, 0) if keys == 128 else (4, 0)
    if fills:
        keys, slots, fewer = 64, 2, 0
    # Searching takes the producer's registers.
    registers = (232, 40) if mask == "search" else (240, 24)
    most = _most(plan)
    return HopperTile(
        2 * HALF,
        keys,
        slots,
        *registers,
        fewer_values=fewer,
        out_fills_registers=fills,
        out_in_halves=fills or roped,
        least=math.ceil(most - ROOM) if most is not None and most <= MOST else None,
    )


def _most(plan: AttentionPlan) -> float | None:
    """What a tanh is multiplied by to give the logits, in base 2: they are between -most and most."""
    spec, form = plan.spec, plan.form
    capped = isinstance(form.core, Call) and form.core.fn == "tanh" and form.max_of_core
    if not capped or spec.dtype != "bf16" or spec.sinks:
        return None
    numbers: dict[Node, Node] = {
        Var(name, param.scalar): Const(param.value, param.scalar)
        for name, param in spec.params.items()
        if param.value is not None
    }
    numbers[LOG2E] = Const(math.log2(math.e), Type.FLOAT)
    most = Algebra().to_sympy(substitute(form.multiplier, numbers))
    return float(most) if most.is_number else None


def _dq_tile(plan: AttentionPlan, width: int) -> HopperTile:
    if width == WIDE:
        return HopperTile(2 * HALF, HALF, 2)
    return HopperTile(2 * HALF, HALF, 3 if has_rope_dims(plan) else 4)


def _dkdv_tile(plan: AttentionPlan, width: int) -> HopperTile:
    if width == min(WIDTHS):
        return HopperTile(HALF, 2 * HALF, 4, halves=True)
    if width == WIDE:
        return HopperTile(HALF, HALF, 2)
    if has_rope_dims(plan):
        return HopperTile(HALF, HALF, 3)
    return HopperTile(HALF, 2 * HALF, 2) if _light(plan.dkdv) else HopperTile(HALF // 2, 2 * HALF, 4)


def _light(loop: TileLoop | None) -> bool:
    """Whether what multiplies dP wants one value of a pair beside P, at most, as a soft cap its tanh: of 64 queries
    there are no registers for more beside dk and dv."""
    if loop is None or is_one(loop.dscore):
        return loop is not None
    of_pairs = {QK.name, *(b.name for b in loop.program.bindings if b.place == TILE)}
    return len(variables(loop.program.results["dscore"]) & of_pairs) <= 1


def _fused(plan: AttentionPlan) -> bool:
    """Whether one kernel is for all three gradients: it has no rows to sum over keys, and what multiplies dq at the
    end is the scale alone. Not of documents, short as they are: two kernels were ahead, or level."""
    loops = [loop for loop in (plan.dq, plan.dkdv) if loop is not None]
    plain = all(_light(loop) and is_one(loop.dscore_factor) and not loop.gradients for loop in loops)
    registers = width_of(plan) != WIDE and not has_rope_dims(plan)
    return plain and registers and not plan.problem.varlen and plan.problem.mask != "search"
