"""Lowering of the attention kernels that loop over tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kgen.expr.mask_form import TRUE
from kgen.expr.nodes import walk
from kgen.kernels.attention.lowered.arguments import tile_params
from kgen.kernels.attention.lowered.bodies import body_of
from kgen.kernels.attention.lowered.gradients import gradients_of
from kgen.kernels.attention.lowered.loads import load_of, operands_of
from kgen.kernels.attention.lowered.lowering import Lowering, read_before
from kgen.kernels.attention.lowered.model import (
    KEYS,
    QUERIES,
    Gradients,
    Load,
    LoopKernel,
    Operands,
    side_of,
)
from kgen.kernels.attention.lowered.ranges import ranges_of
from kgen.kernels.attention.plan.model import OFFS_N, TileLoop
from kgen.targets.code import Code, Name, Statement, assign, at_first_use, atom, op, uses_of
from kgen.targets.triton.printer import Printer, column


@dataclass(frozen=True)
class _Guards:
    """Guards of a kernel's loads and stores by row. None means that all rows exist."""

    outer: Code | None
    """Guard of the tiles that the kernel holds."""
    inner: Code | None
    """Guard of the tiles that stream."""
    stored: Code | None
    """Guard of the tiles that the kernel stores."""
    vectors: Code | None
    """Guard of the vectors that the kernel stores."""
    loaded: Code | None
    """Guard of the loads of log-sum-exp and delta."""


def loop_kernel(
    lowering: Lowering, loop: TileLoop, state: Sequence[str], descriptors: bool = True
) -> LoopKernel:
    """Lower a loop to its kernel.

    `state` are the values that the loop carries. Without `descriptors`, the kernel loads by
    pointers only.
    """
    outer, printer = side_of(loop.outer), lowering.printer(loop)
    guards, before = _guards(lowering, loop, printer), _before(lowering, loop, printer)
    shared, prologue = _split_by_head(lowering, before) if outer is KEYS else ([], before)
    body = body_of(lowering, loop, printer, by_rows=descriptors)
    backward = loop is not lowering.plan.forward
    gradients = gradients_of(lowering, loop, printer) if backward else None
    ranges = ranges_of(lowering.plan, loop, printer, read_before(loop.program))
    params = tile_params(lowering, loop, body, gradients, guards.loaded, before, descriptors)
    bounds = [line for span in ranges.spans for line in span.bounds]
    asking = [*before, *ranges.searches, *bounds]
    return LoopKernel(
        outer=outer,
        inner=side_of(loop.inner),
        operands=_operands(lowering, loop, guards),
        shared_prologue=shared,
        prologue=prologue,
        # The live keys may depend on the query head.
        held_by_head=any(f"{outer.name}_live" in line.defines for line in prologue),
        ranges=ranges,
        body=body,
        gradients=gradients,
        state=list(state),
        params=params,
        stored_qk=_stored_qk(lowering, loop, guards, gradients),
        stored_v=[load_of(c, guards.outer, guards.stored) for c in lowering.plan.v_chunks],
        store_guard=guards.vectors,
        vector_guard=guards.loaded,
        row_rest=None if backward else lowering.row_rest(loop, printer),
        sink=lowering.sink(loop, printer),
        last=loop.outer.last.name in uses_of(asking) | {p.name for p in params},
    )


def _guards(lowering: Lowering, loop: TileLoop, printer: Printer) -> _Guards:
    plan, results, outer = lowering.plan, loop.program.results, side_of(loop.outer)
    of_outer = plan.q if outer is QUERIES else plan.kv
    live, bound = results["outer_live"], of_outer.bound
    exists = Name(f"{outer.name}_live") if of_outer.live == bound else printer.own(bound)
    # Queries are the rows of the tile in dq and forward, and the columns of the loop in dkdv.
    rows = live if outer is QUERIES else results["inner_live"]
    return _Guards(
        outer=None if live == TRUE else column(f"{outer.name}_live"),
        inner=None if loop.inner_live == TRUE else column(f"{side_of(loop.inner).name}_live"),
        stored=None if bound == TRUE else atom(exists, "{0}[:, None]"),
        vectors=None if bound == TRUE else exists,
        loaded=None if rows == TRUE or loop is plan.forward else Name("q_live"),
    )


def _before(lowering: Lowering, loop: TileLoop, printer: Printer) -> list[Statement]:
    """Return the statements before the loop."""
    live, bindings = loop.program.results["outer_live"], loop.program.before_loop()
    lines = lowering.lines_of(bindings, printer)
    if live != TRUE:
        name = f"{side_of(loop.outer).name}_live"
        lines = at_first_use(lines, [assign(name, printer.own(live))])
    if side_of(loop.inner) is KEYS and OFFS_N in {n for b in bindings for n in walk(b.node)}:
        lines.insert(0, assign("offs_n", op("{tl}.arange(0, {0})", "BLOCK_N")))
    return lines


def _split_by_head(
    lowering: Lowering, before: list[Statement]
) -> tuple[list[Statement], list[Statement]]:
    """Split statements into those independent of the query head, and the others.

    Without grouped queries, all statements are in the first list, because there is one query head.
    """
    if not lowering.plan.grouped:
        return before, []
    changing = {"h"}
    by_head, shared = list[Statement](), list[Statement]()
    for statement in before:
        if changing & statement.uses:
            changing |= statement.defines
            by_head.append(statement)
        else:
            shared.append(statement)
    return shared, by_head


def _operands(lowering: Lowering, loop: TileLoop, guards: _Guards) -> Operands:
    outer, inner = side_of(loop.outer), side_of(loop.inner)
    streamed: tuple[tuple[str, ...], ...] = (("q", "do"),) if inner is QUERIES else (("k", "v"),)
    held: tuple[str, ...] = ("q", "do") if outer is QUERIES else ("k", "v")
    if loop is lowering.plan.forward:
        streamed, held = (("k",), ("v",)), ("q",)
    of = {inner.name: guards.inner, outer.name: guards.outer}
    return operands_of(lowering.plan, lowering.kv_head, streamed, held, of)


def _stored_qk(
    lowering: Lowering, loop: TileLoop, guards: _Guards, gradients: Gradients | None
) -> list[Load]:
    found = [load_of(c, guards.outer, guards.stored) for c in lowering.plan.qk_chunks]
    if gradients is None:
        return found
    x = "dq" if side_of(loop.outer) is QUERIES else "dk"
    return [replace(of, value=atom(gradients.scaled(f"{x}{of.tag}"))) for of in found]


def accumulators(loop: TileLoop) -> list[str]:
    """Return the names of the sums for gradients of buffers that a loop carries."""
    return [f"d_{g.name}" for g in loop.gradients if g.along != "pair"]
