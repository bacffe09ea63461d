"""Kernels for gradients of buffers alone, which compute tiles of the scores once more: what `_pair.j2` and
`_diagonal.j2` name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kgen.expr.differentiate import is_one
from kgen.expr.mask_form import TRUE
from kgen.expr.nodes import Type, Var
from kgen.expr.spelling import MUL
from kgen.kernels.attention.lowered.kernels import KernelFields
from kgen.kernels.attention.lowered.loads import load_of, streamed_load
from kgen.kernels.attention.plan.model import AttentionPlan, TileLoop
from kgen.targets.code import (
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
)
from kgen.targets.triton.printer import Printer, column


@dataclass(frozen=True)
class _Bound:
    """Whether a side of a tile ends before the tensor does, and the mask of a store where it may not."""

    whole: Code
    guard: Code


def pair_fields(kernels: KernelFields, loop: TileLoop) -> dict[str, Any]:
    """The kernel for a gradient with an element for each (query, key)."""
    program, (g,) = loop.program, loop.gradients
    assert g.summed is not None
    printer = kernels.printer(loop)
    fields = _recomputed(kernels, loop, printer)
    present = [d for d in ("b", "h") if d in g.summed]
    outer: dict[str, Code] = {n: Name("outer") for n in present}
    if len(present) == 2:
        outer = {"b": over("outer", "HQ"), "h": op("{0} % {1}", "outer", "HQ", binds=MUL, operand=MUL)}
    name, bounds = fields["name"], _bounds(kernels.plan)
    indices = tuple(Var(f"outer_{n}" if n in outer else n, Type.INT) for n in g.summed)
    address = renamed(
        printer.address(name, indices, ("q", "kv")), {f"outer_{n}": value for n, value in outer.items()}
    )
    lines, inside = (kernels.lines_of(program.before_loop(), p) for p in (printer, _inside(printer)))
    unguarded = {line: other for line, other in zip(lines, inside, strict=True) if line != other}
    stored = conjunction(b.guard for b in bounds)
    return fields | {
        "scaled_part": kernels.scaled(fields["part"], g, printer),
        "stride_params": ", ".join(f"stride_{name}_{d}: tl.int64" for d in range(len(g.indices))),
        "inside": conjunction(op("({0})", b.whole) for b in bounds),
        "bounded": bool(bounds),
        "given": [assign(n, value) for n, value in outer.items()],
        "prologue": [
            _in_two(line, unguarded.get(line))
            for line in at_first_use(lines, _conditions(loop, printer, in_loop=False))
        ],
        "count": {(): "B * HQ", ("b",): "HQ", ("h",): "B", ("b", "h"): "1"}[tuple(present)],
        "summed": {
            (): ["b, h = inner // HQ, inner % HQ"],
            ("b",): ["h = inner"],
            ("h",): ["b = inner"],
            ("b", "h"): [],
        }[tuple(present)],
        "programs": {(): None, ("b",): "B", ("h",): "HQ", ("b", "h"): "B * HQ"}[tuple(present)],
        "address": address,
        "store_guard": stored,
    }


def diagonal_fields(kernels: KernelFields, loop: TileLoop) -> dict[str, Any]:
    """The kernel for a gradient with an element for each distance of each (b, h)."""
    program, printer = loop.program, kernels.printer(loop)
    allowed, (g,) = program.results.get("allowed"), loop.gradients
    fields = _recomputed(kernels, loop, printer)
    sums = f"{fields['name']}_sums"
    selected = kernels.may_be_nan(g.factor)
    return fields | {
        "prologue": at_first_use(
            kernels.lines_of(program.before_loop(), printer), _conditions(loop, printer, in_loop=False)
        ),
        "factor": None if selected or is_one(g.factor) else atom(kernels.scalar(g.factor, printer)),
        "scaled_sums": [assign(sums, kernels.scaled(sums, g, printer))] * selected,
        "bounded": allowed is not None,
        "allowed": "" if allowed is None else printer.tile(allowed),
    }


def _recomputed(kernels: KernelFields, loop: TileLoop, printer: Printer) -> dict[str, Any]:
    """A tile of the gradient of the modified score, recomputed by a kernel that is for the gradient of a buffer."""
    plan, program, (g,) = kernels.plan, loop.program, loop.gradients
    fields = kernels.tile_fields(loop, printer)
    lines, part = kernels.contribution(loop, printer, g)
    # All of its tiles have the mask.
    lines = [s for line in lines for s in (line.then if isinstance(line, If) else (line,))]
    q_live, kv_live = program.results["outer_live"], program.results["inner_live"]
    q_guard = None if q_live == TRUE else column("q_live")
    kv_guard = None if kv_live == TRUE else column("kv_live")
    # Loads need what a mask leaves of either side, too.
    mask_lines = at_first_use(
        kernels.lines_of(program.in_loop(needed_by=("mask", "inner_live", "outer_live")), printer),
        _conditions(loop, printer, in_loop=True),
    )
    scored = [line for line in fields["score_lines"] if line not in mask_lines]
    return fields | {
        "name": f"d_{g.name}",
        "mask_lines": mask_lines,
        "score_lines": scored,
        "q_loads": [load_of(c, q_guard) for c in plan.qk_chunks],
        "k_loads": [streamed_load(c, kv_guard) for c in plan.qk_chunks],
        "v_loads": [
            replace(streamed_load(c, kv_guard), do_guard=load_of(c, q_guard).guard) for c in plan.v_chunks
        ],
        "vector_load": None if q_live == TRUE else Name("q_live"),
        "gradient_lines": lines,
        "part": part,
    }


def _conditions(loop: TileLoop, printer: Printer, in_loop: bool) -> list[Statement]:
    """Which positions of each side of a tile are there, and its mask: computed in the loop, or before it."""
    program, names = loop.program, {"q_live": "outer_live", "kv_live": "inner_live"}
    own = {name: printer.own(program.results[result]) for name, result in names.items()}
    own |= {"mask": printer.tile(program.results["mask"])}
    return [
        assign(name, value)
        for name, value in own.items()
        if (node := program.results[names.get(name, name)]) != TRUE and program.place(node).in_loop == in_loop
    ]


def _bounds(plan: AttentionPlan) -> list[_Bound]:
    """Of a tile of both sides: which of its sides may reach past the end."""
    sides = ((plan.q, "q", "BLOCK_M", "({0})[:, None]"), (plan.kv, "kv", "BLOCK_N", "({0})[None, :]"))
    return [
        _Bound(
            row("le", row("add", f"{x}_start", block), f"S{x[0].upper()}"),
            op(form, row("lt", f"{x}_idx", f"S{x[0].upper()}")),
        )
        for guards, x, block, form in sides
        if guards.bound != TRUE
    ]


def _inside(printer: Printer) -> Printer:
    """A printer for tiles that no side of reaches past the end."""
    greatest = {"q_idx": {"SQ": 1, "": -1}, "kv_idx": {"SK": 1, "": -1}}
    return replace(printer, ranges=replace(printer.ranges, greatest={**printer.ranges.greatest, **greatest}))


def _in_two(line: Statement, unguarded: Statement | None) -> Statement:
    """A line, or what it is in tiles that are inside of both tensors and in the others."""
    return line if unguarded is None else If(Name("whole"), (unguarded,), (line,))
