"""Kernels that compute only gradients of buffers. They recompute tiles of the scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kgen.expr.differentiate import is_one
from kgen.expr.mask_form import TRUE
from kgen.expr.nodes import Type, Var
from kgen.expr.spelling import MUL
from kgen.kernels.attention.lowered.bodies import body_of
from kgen.kernels.attention.lowered.gradients import contribution
from kgen.kernels.attention.lowered.loads import load_of, streamed_load
from kgen.kernels.attention.lowered.lowering import Lowering, strides_of
from kgen.kernels.attention.lowered.model import KEYS, QUERIES, Load, Param, TileBody
from kgen.kernels.attention.plan.model import AttentionPlan, TileLoop
from kgen.targets.code import (
    Assign,
    Code,
    If,
    Name,
    Statement,
    assign,
    at_first_use,
    atom,
    conjunction,
    op,
    over,
    renamed,
    row,
    text,
)
from kgen.targets.triton.printer import Printer, column


@dataclass(frozen=True)
class ValueLoads:
    """A block of columns of V, and the same columns of dO."""

    v: Load
    do: Load


@dataclass(frozen=True)
class Recomputed:
    """A recomputed tile of the gradient of the modified score, for the gradient of a buffer."""

    name: str
    """Name of the gradient in the launcher and in the kernel."""
    body: TileBody
    q_loads: list[Load]
    k_loads: list[Load]
    v_loads: list[ValueLoads]
    vector_guard: Code | None
    """Guard for loads of log-sum-exp and delta."""
    gradient_lines: list[Statement]
    """Statements before `part`."""
    part: Code
    """The tile's part of the gradient."""


@dataclass(frozen=True)
class Shared:
    """The batches and heads that share an element of a gradient."""

    count: Code
    """Number of (batch, head) pairs that share an element."""
    lines: list[Statement]
    """Statements that compute batch and head from the number of the pair."""
    programs: Code | None
    """Number of elements per pair of positions. None for one."""


@dataclass(frozen=True)
class PairKernel:
    """The kernel for a gradient with an element for each (query, key)."""

    tile: Recomputed
    shared: Shared
    given: list[Statement]
    """Statements that compute the batch or the head from a program's number."""
    prologue: list[Statement]
    """Statements before the loop."""
    inside: Code | None
    """Condition for tiles inside both tensors. None if all tiles are inside."""
    value: Code
    """The tile's part for one batch and head."""
    address: Code
    """Address of the store."""
    store_guard: Code | None
    """Guard of the store. None if all elements exist."""
    gradient_strides: list[Param]
    """Parameters for the strides of the gradient."""


@dataclass(frozen=True)
class DiagonalKernel:
    """The kernel for a gradient with an element for each distance of each (b, h)."""

    tile: Recomputed
    prologue: list[Statement]
    allowed: Code | None
    """Condition for distances that the mask keeps. None for all distances."""
    factor: Code | None
    """Factor of the sums. None without one, or with `selected`."""
    selected: list[Statement]
    """Statements that apply a factor that may be infinite or NaN."""


@dataclass(frozen=True)
class _Bound:
    """Conditions for one side of a tile that may reach past the end of a tensor."""

    whole: Code
    """Condition that the side is inside the tensor."""
    guard: Code
    """Guard of a store for a tile that reaches past the end."""


_BOTH = Assign(
    ("b", "h"), (over("inner", "HQ"), op("{0} % {1}", "inner", "HQ", binds=MUL, operand=MUL))
)
_PAIRS = row("mul", "B", "HQ")
_SHARED = {
    (): Shared(_PAIRS, [_BOTH], None),
    ("b",): Shared(Name("HQ"), [assign("h", "inner")], Name("B")),
    ("h",): Shared(Name("B"), [assign("b", "inner")], Name("HQ")),
    ("b", "h"): Shared(text("1"), [], _PAIRS),
}
"""Shared batches and heads, by the dimensions of a gradient other than positions."""


def pair_kernel(lowering: Lowering, loop: TileLoop) -> PairKernel:
    """Lower a loop for a gradient with an element for each (query, key)."""
    program, printer, (g,) = loop.program, lowering.printer(loop), loop.gradients
    assert g.summed is not None
    own = tuple(d for d in ("b", "h") if d in g.summed)
    outer: dict[str, Code] = {n: Name("outer") for n in own}
    if len(own) == 2:
        outer = {
            "b": over("outer", "HQ"),
            "h": op("{0} % {1}", "outer", "HQ", binds=MUL, operand=MUL),
        }
    tile, bounds = _recomputed(lowering, loop, printer), _bounds(lowering.plan)
    indices = tuple(Var(f"outer_{n}" if n in outer else n, Type.INT) for n in g.summed)
    address = printer.address(tile.name, indices, ("q", "kv"))
    lines, inside = (
        lowering.lines_of(program.before_loop(), p) for p in (printer, _inside(printer))
    )
    unguarded = {line: other for line, other in zip(lines, inside, strict=True) if line != other}
    before = at_first_use(lines, _conditions(loop, printer, in_loop=False))
    rank = len(g.indices)
    return PairKernel(
        tile=tile,
        shared=_SHARED[own],
        given=_given(outer),
        prologue=[_in_two(line, unguarded.get(line)) for line in before],
        inside=conjunction(op("({0})", b.whole) for b in bounds),
        value=lowering.scaled(tile.part, g, printer),
        address=renamed(address, {f"outer_{n}": value for n, value in outer.items()}),
        store_guard=conjunction(b.guard for b in bounds),
        gradient_strides=strides_of(tile.name, rank, wide=rank),
    )


def _given(outer: Mapping[str, Code]) -> list[Statement]:
    """Return the statements that compute the batch or the head from a program's number."""
    number = assign("outer", op("pid // (q_tiles * kv_tiles)"))
    return [number, *(assign(n, value) for n, value in outer.items())] if outer else []


def diagonal_kernel(lowering: Lowering, loop: TileLoop) -> DiagonalKernel:
    """Lower a loop for a gradient with an element for each distance of each (b, h)."""
    program, printer, (g,) = loop.program, lowering.printer(loop), loop.gradients
    allowed, tile = program.results.get("allowed"), _recomputed(lowering, loop, printer)
    sums, selected = f"{tile.name}_sums", lowering.may_be_nan(g.factor)
    lines = lowering.lines_of(program.before_loop(), printer)
    return DiagonalKernel(
        tile=tile,
        prologue=at_first_use(lines, _conditions(loop, printer, in_loop=False)),
        allowed=None if allowed is None else printer.tile(allowed),
        factor=None if selected or is_one(g.factor) else atom(lowering.scalar(g.factor, printer)),
        selected=[assign(sums, lowering.scaled(sums, g, printer))] if selected else [],
    )


def _recomputed(lowering: Lowering, loop: TileLoop, printer: Printer) -> Recomputed:
    """Build the recomputed tile of a kernel for the gradient of a buffer."""
    plan, program, (g,) = lowering.plan, loop.program, loop.gradients
    body = body_of(lowering, loop, printer)
    lines, part = contribution(lowering, loop, printer, g)
    # Every tile of this kernel has the mask, so only the MASKED branch remains.
    lines = [s for line in lines for s in (line.then if isinstance(line, If) else (line,))]
    q_live, kv_live = program.results["outer_live"], program.results["inner_live"]
    q_guard = None if q_live == TRUE else column("q_live")
    kv_guard = None if kv_live == TRUE else column("kv_live")
    # The guards of loads need the live positions of both sides.
    mask_lines = at_first_use(
        lowering.lines_of(program.in_loop(needed_by=("mask", "inner_live", "outer_live")), printer),
        _conditions(loop, printer, in_loop=True),
    )
    scored = [line for line in body.score_lines if line not in mask_lines]
    v_loads = [streamed_load(c, kv_guard) for c in plan.v_chunks]
    do_guards = [load_of(c, q_guard).guard for c in plan.v_chunks]
    return Recomputed(
        name=f"d_{g.name}",
        body=replace(body, mask_lines=mask_lines, score_lines=scored),
        q_loads=[load_of(c, q_guard) for c in plan.qk_chunks],
        k_loads=[streamed_load(c, kv_guard) for c in plan.qk_chunks],
        v_loads=[
            ValueLoads(v, replace(v, guard=guard))
            for v, guard in zip(v_loads, do_guards, strict=True)
        ],
        vector_guard=None if q_live == TRUE else Name("q_live"),
        gradient_lines=lines,
        part=part,
    )


def _conditions(loop: TileLoop, printer: Printer, in_loop: bool) -> list[Statement]:
    """Return the statements for live positions of each side and for the mask, in the loop or before
    it.
    """
    program, names = loop.program, {"q_live": "outer_live", "kv_live": "inner_live"}
    own = {name: printer.own(program.results[result]) for name, result in names.items()}
    own |= {"mask": printer.tile(program.results["mask"])}
    return [
        assign(name, value)
        for name, value in own.items()
        if (node := program.results[names.get(name, name)]) != TRUE
        and program.place(node).in_loop == in_loop
    ]


def _bounds(plan: AttentionPlan) -> list[_Bound]:
    """Return the conditions for the sides of a tile that may reach past the end."""
    sides = ((plan.q, QUERIES, "({0})[:, None]"), (plan.kv, KEYS, "({0})[None, :]"))
    return [
        _Bound(
            row("le", row("add", f"{side.name}_start", side.block), side.length),
            op(form, row("lt", f"{side.name}_idx", side.length)),
        )
        for guards, side, form in sides
        if guards.bound != TRUE
    ]


def _inside(printer: Printer) -> Printer:
    """Return a printer for tiles that are inside both tensors."""
    greatest = {"q_idx": {"SQ": 1, "": -1}, "kv_idx": {"SK": 1, "": -1}}
    return replace(
        printer, ranges=replace(printer.ranges, greatest={**printer.ranges.greatest, **greatest})
    )


def _in_two(line: Statement, unguarded: Statement | None) -> Statement:
    """Return a statement, or a branch between its form for tiles inside both tensors and its
    general form.
    """
    return line if unguarded is None else If(Name("whole"), (unguarded,), (line,))
