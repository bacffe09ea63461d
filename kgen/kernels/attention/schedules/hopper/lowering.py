"""Build the Hopper kernels from the portable kernels.

They are written in Gluon, which has Triton's functions in its own namespace. Values with positions
get their layout from the index vectors that the templates define.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kgen.kernels.attention.lowered.bodies import body_of
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.lowered.row_max import row_results_of
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.schedules.hopper.kernels import (
    Common,
    DkdvKernel,
    DqKernel,
    ForwardKernel,
    FusedKernel,
    Kernels,
    RingAt,
    SkippedRings,
    key_slots,
    late_of,
    next_item,
    rings_of_dq,
    stored_in_place,
    stored_keys,
    streamed_queries,
)
from kgen.kernels.attention.schedules.hopper.keys import KeysLoop, keys_loop, with_keys_masked
from kgen.kernels.attention.schedules.hopper.loops import gradient_of_scores
from kgen.kernels.attention.schedules.hopper.operands import (
    SINKS,
    Operands,
    tiles_of_keys,
    tiles_of_queries,
)
from kgen.kernels.attention.schedules.hopper.plan import HopperPlan, plan_hopper
from kgen.kernels.attention.schedules.hopper.portable import Portable, Surroundings
from kgen.kernels.attention.schedules.hopper.queries import (
    HiddenKeys,
    QueriesLoop,
    QuerySteps,
    hidden_keys,
    last_masked,
    queries_loop,
)
from kgen.kernels.attention.schedules.hopper.reads import columns_of, pages_of
from kgen.kernels.attention.schedules.hopper.records import reached
from kgen.kernels.attention.schedules.hopper.rows import load_of_row, store_of_row
from kgen.kernels.attention.schedules.hopper.streams import streams_of
from kgen.targets.code import Code, Name, row
from kgen.targets.template import filled


@dataclass(frozen=True)
class HopperLoops:
    """The loops of the Hopper kernels."""

    forward: QueriesLoop | None
    dq: QueriesLoop | None
    dkdv: KeysLoop | None
    hidden_keys: HiddenKeys | None

    @property
    def last_masked(self) -> Code:
        """The number of masked tiles of keys at the end of a range, in the producer of forward and
        dq.
        """
        assert self.forward is not None
        return last_masked(self.forward, self.dq)


def hopper_loops(
    plan: HopperPlan, attention: AttentionPlan, kernels: Lowering, portable: Portable
) -> HopperLoops:
    """Return the loop of each kernel, built from the portable loops."""
    # The producer publishes the lengths of packed sequences with each tile.
    known = [*kernels.problem, *(("SQ", "SK") if kernels.packed else ())]
    forward, hidden = _forward_loop(plan, attention, kernels, portable, known)
    dq, dkdv = None, None
    if plan.dq is not None:
        assert portable.dq is not None
        assert attention.dq is not None
        steps = QuerySteps(
            plan.dq, plan.idioms["dq"], roped=plan.rope > 0, begun=not plan.dq_rings_apart
        )
        dq = queries_loop(portable.dq, steps, attention.dq, kernels, known)
    if plan.dkdv is not None:
        assert portable.dkdv is not None
        assert attention.dkdv is not None
        kernel = with_keys_masked(portable.dkdv) if plan.fused else portable.dkdv
        dkdv = keys_loop(
            kernel, plan, attention.dkdv, kernels, known, frozenset(hidden.names if hidden else ())
        )
    return HopperLoops(forward, dq, dkdv, hidden)


def _reached(loops: HopperLoops, reach: Mapping[str, str]) -> HopperLoops:
    """Return the loops with names as fields of the records of their functions."""
    hidden = loops.hidden_keys
    if hidden is not None:
        given = [reach.get(name, name) for name in hidden.names]
        hidden = replace(hidden, needed=reached(hidden.needed, reach), given=given)
    return HopperLoops(
        loops.forward and loops.forward.reached(reach),
        loops.dq and loops.dq.reached(reach),
        loops.dkdv and loops.dkdv.reached(reach),
        hidden,
    )


def _forward_loop(
    plan: HopperPlan,
    attention: AttentionPlan,
    kernels: Lowering,
    portable: Portable,
    known: list[str],
) -> tuple[QueriesLoop | None, HiddenKeys | None]:
    """Return the loop of forward, and its test for keys that only the mask hides."""
    if plan.forward is None:
        return None, None
    kernel, streams = portable.forward, streams_of(plan, kernels)
    if streams:
        of = attention.forward
        given = [s.binding for s in streams]
        rest = body_of(kernels, of, kernels.printer(of), given=given).score_lines
        kernel = replace(
            kernel, body=replace(kernel.body, score_lines=[*(s.line for s in streams), *rest])
        )
    steps = QuerySteps(
        plan.forward,
        plan.idioms["forward"],
        roped=plan.rope > 0,
        begun=plan.forward.chained,
        forward=True,
    )
    problem = [*known, *(f"{s.name}_ring" for s in streams)]
    loop = queries_loop(kernel, steps, attention.forward, kernels, problem)
    return loop, hidden_keys(
        kernel, loop, problem, plan.hidden_scores
    ) if plan.hidden_keys else None


def hopper_kernels(
    attention: AttentionPlan, kernels: Lowering, portable: Portable, placement: Surroundings
) -> Kernels | None:
    """Return the Hopper kernels, or None if the plan has none."""
    plan = plan_hopper(attention)
    if plan is None:
        return None
    operands = Operands(plan, kernels)
    loops = _reached(hopper_loops(plan, attention, kernels, portable), operands.reach)
    common = _common(plan, kernels, loops, operands, placement)
    return Kernels(
        plan=plan,
        common=common,
        forward=_forward(plan, kernels, loops, operands, placement),
        dq=_dq(plan, kernels, portable, loops, operands, common.vectors),
        dkdv=_dkdv(plan, kernels, portable, loops, operands),
        fused=_fused(plan, kernels, operands, placement),
    )


def _common(
    plan: HopperPlan,
    kernels: Lowering,
    loops: HopperLoops,
    operands: Operands,
    placement: Surroundings,
) -> Common:
    return filled(
        Common,
        operands.rows,
        packed=kernels.packed,
        grouped=kernels.plan.grouped,
        kv_head=kernels.kv_head,
        kv_heads=operands.reach.get(placement.kv_heads, placement.kv_heads),
        listed=kernels.plan.forward.listed,
        dynamic=plan.dynamic,
        problem=operands.problem,
        problem_params=placement.problem_params,
        no_specialize=placement.no_specialize,
        width=plan.width,
        rope=plan.rope,
        q=operands.q,
        k=operands.k,
        vectors=reached(placement.vectors, operands.reach),
        consumers=operands.consumers,
        streams=streams_of(plan, kernels),
        hidden_keys=[loops.hidden_keys] if loops.hidden_keys is not None else [],
    )


def _forward(
    plan: HopperPlan,
    kernels: Lowering,
    loops: HopperLoops,
    operands: Operands,
    placement: Surroundings,
) -> ForwardKernel | None:
    if plan.forward is None:
        return None
    assert loops.forward is not None
    spec, streams = kernels.spec, streams_of(plan, kernels)
    pages = pages_of(plan, spec.paged_kv.page_size if spec.paged_kv is not None else None)
    sinks, fewer = SINKS if spec.sinks else [], plan.forward.fewer_values
    values = f"SLOTS - {fewer}" if fewer else "SLOTS"
    of_streams = [RingAt(f"{s.name}_ring", row("sub", "n_used", "i")) for s in streams]
    return ForwardKernel(
        row_results=row_results_of(spec, apart=plan.forward.chained or spec.sinks),
        tile=plan.forward,
        loop=loops.forward,
        published=tiles_of_queries(loops.forward, loops.dq, kernels.packed),
        last_masked=loops.last_masked,
        operands=operands.forward(streams, pages, sinks),
        pages=pages,
        unpaged=loops.hidden_keys if spec.paged_kv is not None else None,
        lag=operands.lag,
        key_slots=key_slots(operands.k, values, plan.width if spec.paged_kv is not None else None),
        columns_of_out=columns_of(plan, spec.head_dim.v),
        lanes=[256 // plan.width, plan.width // 8],
        k_bytes="NBYTES + args.k_rope_desc.block_type.nbytes" if plan.rope else "NBYTES",
        next_item=next_item(plan.dynamic, Name("args.counter_ptr")),
        skipped=SkippedRings("kv_ring", of_streams),
        sink_load=reached(placement.sink_load, operands.reach) if spec.sinks else None,
        on_dead_rows=placement.dead_rows,
    )


def _dq(
    plan: HopperPlan,
    kernels: Lowering,
    portable: Portable,
    loops: HopperLoops,
    operands: Operands,
    vectors: Code,
) -> DqKernel | None:
    if plan.dq is None:
        return None
    assert loops.forward is not None
    assert loops.dq is not None
    assert portable.dq is not None
    assert portable.dq.gradients is not None
    gradients, gradient = portable.dq.gradients, gradient_of_scores(portable.dq.gradients)
    # Only at run time it is known if a tile needs a mask. So the mask is applied once, after all
    # values that it hides.
    late = loops.dq.body.masked and (kernels.packed or gradients.open_ended)
    rings, inner = rings_of_dq(plan), loops.dq.fixed.reach
    return DqKernel(
        tile=plan.dq,
        loop=loops.dq,
        published=tiles_of_queries(loops.forward, loops.dq, kernels.packed),
        gradient=reached(gradient, inner),
        late=reached(late_of(gradients, late), inner),
        dqk=gradients.dqk if late else gradient.dqk,
        operands=operands.dq(rings.key_rings, gradients.row_sums),
        lse=load_of_row("lse", vectors, loops.dq.vector_guard),
        delta=load_of_row("delta", vectors, loops.dq.vector_guard),
        row_gradients=gradients.row_gradients,
        row_sums=gradients.row_sums,
        stored=[line for x in operands.q for line in stored_in_place(x, gradients, operands)],
        sums_over_keys=[
            store_of_row(g.name, reached(g.value, operands.reach), vectors, loops.dq.store_guard)
            for g in gradients.row_gradients
        ],
        rings=rings,
        also=gradients.also,
        key_slots=key_slots(operands.k),
    )


def _dkdv(
    plan: HopperPlan, kernels: Lowering, portable: Portable, loops: HopperLoops, operands: Operands
) -> DkdvKernel | None:
    if plan.dkdv is None:
        return None
    assert loops.dkdv is not None
    place, rows = "1" if plan.split_dkdv else "at_k % 8", operands.rows
    if plan.fused:
        place = "v_slot % KV_SLOTS"
    return DkdvKernel(
        tile=plan.dkdv,
        loop=loops.dkdv,
        published=tiles_of_keys(loops.dkdv, kernels.packed),
        operands=operands.dkdv(),
        queries=streamed_queries(operands),
        split=plan.split_dkdv,
        next_item=next_item(plan.dynamic, row("add", "args.counter_ptr", 1)),
        head_columns=kernels.spec.head_dim.qk,
        held_keys=["k_held", "k_rope_held"] if plan.rope else ["k"],
        store_dk=stored_keys("dk", f"kv_ring.slots, {place}", loops.dkdv.stored_dk, rows),
        store_dk_rope=stored_keys(
            "dk_rope", "args.k_rope_ring.slots, 0", loops.dkdv.stored_dk_rope, rows
        ),
        with_dq=plan.fused is not None,
    )


def _fused(
    plan: HopperPlan, kernels: Lowering, operands: Operands, placement: Surroundings
) -> FusedKernel | None:
    if plan.fused is None:
        return None
    return FusedKernel(
        tile=plan.fused,
        operands=operands.fused(),
        columns_guard=columns_of(plan, kernels.spec.head_dim.v).guard,
        strides_of_dq=placement.strides_of_dq,
    )
