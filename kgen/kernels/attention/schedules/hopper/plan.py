"""Plan the Hopper kernels: which passes have them, and their tiles.

The kernels are warp-specialized and use TMA and asynchronous products. `conditions.py` has their
requirements.

- Heads of 128 columns: two consumers of 64 rows each. A thread has 64 registers of accumulators and
  64 of scores. Both consumers read the same tiles from shared memory.
- Heads of 64: the accumulators are half as large. So forward has three consumers, and the kernel of
  dk and dv keeps K and V in registers.
- Heads of 256: one consumer computes dk and the other dv. They exchange tiles through shared
  memory.
- MLA (192/128): dk and dv are split in the same way. The 64 rope columns are tiles of their own,
  with a second product.
- Narrower heads use tiles of the next width, filled up with zeros.
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
"""Rows of a tile per consumer: the rows of one `wgmma`."""


PAIR_ROOM = 2**16
"""Bytes of shared memory for the tiles of the buffer that scores read for each pair."""

ROOM, MOST = 64, 80
"""Limits of exponents for bounded logits.

`ROOM`: powers of two are at most 2^64. In bf16 and fp32, sums of 2^20 of them fit, with values of
up to 2^40. `MOST`: with a bound of at most 80, the powers of a row's first tile are at least 2^-98.
"""


@dataclass(frozen=True)
class HopperTile:
    """Queries and keys of a tile, slots of the rings, and registers per thread.

    `SLOTS` counts tiles in shared memory: K and V together, or Q and dO. `consumer_registers` are
    those of each consumer except the first. The first has the rest of 504 registers, or of 512 with
    three consumers.
    """

    BLOCK_M: int
    BLOCK_N: int
    SLOTS: int
    consumer_registers: int = 240
    producer_registers: int = 24
    fewer_values: int = 0
    """Forward: the number by which slots of V are fewer than slots of K, which is needed
    earlier.
    """
    least: int | None = None
    """Forward with bounded logits: a row subtracts the maximum of its first tile, but at least this
    number.

    The number is rounded up by less than one. None if the kernel follows the running maximum.
    """
    consumers: int = 2
    """Forward: the number of consumers, with 64 queries each.

    With three, one computes while the others wait. None has registers for two tiles, so each
    processes the keys of a tile in two halves.
    """
    out_fills_registers: bool = False
    """Forward: True if out needs 128 registers per thread, which leaves none for Q."""
    out_in_halves: bool = False
    """Forward: True if shared memory has room for only half of the columns of out at a time."""
    halves: bool = False
    """dk and dv: True if a consumer processes the queries of a tile in two halves, with K and V in
    registers.

    The scores of the second half are in flight during the softmax of the first.
    """

    @property
    def chained(self) -> bool:
        """Forward: True if the product of P and V of a tile runs during the softmax of the next
        tile.
        """
        return self.consumers == 2

    @property
    def bounded(self) -> bool:
        """Forward: True if a row subtracts the maximum of its first tile from all of its logits."""
        return self.least is not None

    @property
    def seldom_rescaled(self) -> bool:
        """Forward: True if the running maximum may stay up to 8 below the maximum of a row's
        logits.

        A warp then rescales its accumulators only if the running maximum of one of its rows
        changed.
        """
        return self.chained and not self.bounded

    @property
    def queries_in_registers(self) -> bool:
        """Forward: True if consumers keep Q in registers.

        A product of 64 x 64 reads two operands from shared memory no faster than it multiplies
        them. The slot of Q is then free at once for the next tile of queries.
        """
        return not self.out_fills_registers and (self.BLOCK_N == HALF or not self.chained)


NARROW_FORWARD = HopperTile(3 * HALF, 128, 4, 160, 32, consumers=3)
"""The tile of forward for heads of 64 columns."""


@dataclass(frozen=True)
class HopperPlan:
    """The Hopper kernels of one plan. A kernel is None if the portable kernel was faster.

    A plan with the kernel of dq also has the kernel of dk and dv."""

    forward: HopperTile | None
    dq: HopperTile | None
    dkdv: HopperTile | None
    fused: HopperTile | None
    """One kernel for dq, dk and dv. The separate kernels remain, because their order of summation
    is fixed.
    """
    # The producer takes the next number after the last loads of its tile. If it did so earlier,
    # few programs would get the last tiles: 3 to 10 % slower for causal masks.
    dynamic: bool
    """True if programs take tiles from a counter, because some tiles or sequences take longer than
    others.
    """
    # TMA loads these keys, and they may be NaN. Rows of V are cleared in shared memory, because
    # 0 * NaN is NaN.
    hidden_keys: bool
    """True if a tile may contain hidden keys: keys past an end that only the mask defines."""
    hidden_scores: bool
    """True if the scores of hidden keys must be numbers: scores that share a reciprocal would share
    a NaN.
    """
    pair: Binding | None
    """Forward: the read of a buffer for each pair of a query and a key."""
    page_rows: int | None
    """Forward with paged keys: the keys that TMA loads at a time, a whole page or a whole tile."""
    width: int
    """Columns of a tile of V, and of Q and K without rope columns. TMA fills missing columns with
    zeros.
    """
    rope: int
    """Rope columns: the columns of Q and K beyond the width of V, in latent attention (MLA)."""
    idioms: Mapping[str, Idioms]
    """Idioms of the loops over keys, by kernel: forward and dq."""
    rest_slope: Node | None
    """dk and dv: the slope of `row_rest`, if it is linear in the query."""
    heads: int
    """Minimum number of heads that forward processes at a time.

    Many heads with short ranges share L2, and heavy tiles begin earlier."""

    @property
    def dq_rings_apart(self) -> bool:
        """True if dq has separate rings for K and V: with such wide heads, one tile of V fits."""
        return self.width == WIDE

    @property
    def split_dkdv(self) -> bool:
        """True if one consumer computes dv, and the other dk."""
        return self.width == WIDE or self.rope > 0

    @property
    def least_keys(self) -> int:
        """Number of keys from which one backward kernel was faster than two concurrent kernels."""
        return 2560 if self.dynamic else 1024


def plan_hopper(plan: AttentionPlan) -> HopperPlan | None:
    """Return the Hopper kernels of a plan, or None if no pass has any."""
    missing = without_kernels(plan)
    backward = plan.backward and "backward" not in missing
    if "forward" in missing and not backward:
        return None
    hidden = plan.kv.live != plan.kv.bound
    width, mask, varlen = width_of(plan), plan.problem.mask, plan.problem.varlen
    assert width is not None
    narrow, pair, pages = width < max(WIDTHS), pair_of(plan), plan.spec.paged_kv
    forward = (
        None if "forward" in missing else NARROW_FORWARD if narrow else _forward_tile(plan, pair)
    )
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
    """True if scores contain a tanh: several scores then share one reciprocal."""
    results = (
        node for name in ("core", "bias") if (node := loop.program.results.get(name)) is not None
    )
    made = (b.node for b in loop.program.in_loop(without=("mask", "inner_live")))
    return any(
        isinstance(n, Call) and n.fn == "tanh" for node in (*results, *made) for n in walk(node)
    )


def _idioms(plan: AttentionPlan, loop: TileLoop, begins_anywhere: bool) -> Idioms:
    """Return the idioms of a loop.

    A product begins with a linear bias only if scores are multiplied by a positive number and by
    nothing else. A search for documents needs tiles that may begin at any key.
    """
    scaled = plan.form.core == QK and plan.form.positive
    return Idioms(
        linear_bias(loop) if scaled else None, documents(loop) if begins_anywhere else None
    )


def _forward_tile(plan: AttentionPlan, pair: Binding | None) -> HopperTile:
    mask = plan.problem.mask
    # The tiles at the ends of a range are masked, so short ranges are faster with short tiles.
    keys, slots, fewer = (128, 3, 1) if mask in ("all", "triangle") else (64, 5, 0)
    if pair is not None:
        # the buffer that is read for each pair has the room of two more slots
        keys, slots, fewer = 64, 3, 0
    fills, roped = width_of(plan) == WIDE, has_rope_dims(plan)
    if roped:
        slots, fewer = (2, 0) if keys == 128 else (4, 0)
    if fills:
        keys, slots, fewer = 64, 2, 0
    # A search needs registers of the producer.
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
    """Return the factor of a soft cap's tanh in base 2, or None.

    Logits are between -factor and factor.
    """
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
    return (
        HopperTile(HALF, 2 * HALF, 2) if _light(plan.dkdv) else HopperTile(HALF // 2, 2 * HALF, 4)
    )


def _light(loop: TileLoop | None) -> bool:
    """True if the factor of dP needs at most one value per pair besides P, as a soft cap does.

    With 64 queries, dk and dv leave no registers for more.
    """
    if loop is None or is_one(loop.dscore):
        return loop is not None
    of_pairs = {QK.name, *(b.name for b in loop.program.bindings if b.place == TILE)}
    return len(variables(loop.program.results["dscore"]) & of_pairs) <= 1


def _fused(plan: AttentionPlan) -> bool:
    """True if one kernel computes all three gradients.

    It cannot sum rows over keys, and it multiplies dq only by the scale at the end. Packed
    sequences and documents are short, so two kernels were as fast or faster.
    """
    loops = [loop for loop in (plan.dq, plan.dkdv) if loop is not None]
    plain = all(
        _light(loop) and is_one(loop.dscore_factor) and not loop.gradients for loop in loops
    )
    registers = width_of(plan) != WIDE and not has_rope_dims(plan)
    return plain and registers and not plan.problem.varlen and plan.problem.mask != "search"
