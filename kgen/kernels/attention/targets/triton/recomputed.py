"""Kernels for gradients of buffers alone, which compute tiles of the scores once more: what `_pair.j2` and
`_diagonal.j2` name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kgen.expr.differentiate import is_one
from kgen.expr.mask_form import TRUE
from kgen.expr.nodes import Type, Var
from kgen.kernels.attention.plan.planning import AttentionPlan, TileLoop
from kgen.kernels.attention.targets.triton.kernels import KernelFields
from kgen.targets.triton.printer import Printer
from kgen.targets.triton.text import at_first_use


@dataclass(frozen=True)
class _Bound:
    """Whether a side of a tile ends before the tensor does, and the mask of a store where it may not."""

    whole: str
    guard: str


def pair_fields(kernels: KernelFields, loop: TileLoop) -> dict[str, Any]:
    """The kernel for a gradient with an element for each (query, key)."""
    program, (g,) = loop.program, loop.gradients
    assert g.summed is not None
    printer = kernels.printer(loop)
    fields = _recomputed(kernels, loop, printer)
    present = [d for d in ("b", "h") if d in g.summed]
    at = {
        (): ("", ""),
        ("b",): ("outer", ""),
        ("h",): ("", "outer"),
        ("b", "h"): ("outer // HQ", "outer % HQ"),
    }
    b, h = at[tuple(present)]
    name, bounds = fields["name"], _bounds(kernels.plan)
    address = printer.address(
        name,
        tuple(Var({"b": "outer_b", "h": "outer_h"}.get(n, n), Type.INT) for n in g.summed),
        ("q", "kv"),
    )
    lines, inside = (kernels.lines_of(program.before_loop(), p) for p in (printer, _inside(printer)))
    unguarded = {line: other for line, other in zip(lines, inside, strict=True) if line != other}
    return fields | {
        "stride_params": ", ".join(f"stride_{name}_{d}: tl.int64" for d in range(len(g.indices))),
        "inside": " & ".join(f"({b.whole})" for b in bounds),
        "bounded": bool(bounds),
        "given": [f"{n} = {value}" for n, value in (("b", b), ("h", h)) if value],
        "prologue": [
            x
            for line in at_first_use(lines, _conditions(loop, printer, in_loop=False))
            for x in _in_two(line, unguarded.get(line))
        ],
        "count": {(): "B * HQ", ("b",): "HQ", ("h",): "B", ("b", "h"): "1"}[tuple(present)],
        "summed": {
            (): ["b, h = inner // HQ, inner % HQ"],
            ("b",): ["h = inner"],
            ("h",): ["b = inner"],
            ("b", "h"): [],
        }[tuple(present)],
        "programs": {(): "", ("b",): " * B", ("h",): " * HQ", ("b", "h"): " * B * HQ"}[tuple(present)],
        "address": address.replace("outer_b", b).replace("outer_h", h),
        "store_guard": f", mask={' & '.join(b.guard for b in bounds)}" if bounds else "",
    }


def diagonal_fields(kernels: KernelFields, loop: TileLoop) -> dict[str, Any]:
    """The kernel for a gradient with an element for each distance of each (b, h)."""
    program, printer = loop.program, kernels.printer(loop)
    allowed = program.results.get("allowed")
    return _recomputed(kernels, loop, printer) | {
        "prologue": at_first_use(
            kernels.lines_of(program.before_loop(), printer), _conditions(loop, printer, in_loop=False)
        ),
        "bounded": allowed is not None,
        "allowed": "" if allowed is None else printer.tile(allowed),
    }


def _recomputed(kernels: KernelFields, loop: TileLoop, printer: Printer) -> dict[str, Any]:
    """A tile of the gradient of the modified score, recomputed by a kernel that is for the gradient of a buffer."""
    plan, program, (g,) = kernels.plan, loop.program, loop.gradients
    fields = kernels.tile_fields(loop, printer)
    lines: list[str] = []
    part = kernels.contribution(loop, printer, g, lines)
    lines = [line.strip() for line in lines if line.strip() != "if MASKED:"]
    q_live, kv_live = program.results["outer_live"], program.results["inner_live"]
    q_guard = "" if q_live == TRUE else "q_live[:, None]"
    kv_guard = "" if kv_live == TRUE else "kv_live[:, None]"
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
        "q_loads": [kernels.load(c, q_guard) for c in plan.qk_chunks],
        "k_loads": [kernels.streamed(c, kv_guard) for c in plan.qk_chunks],
        "v_loads": [
            replace(kernels.streamed(c, kv_guard), do_guard=kernels.load(c, q_guard).guard)
            for c in plan.v_chunks
        ],
        "vector_load": ", mask=q_live, other=0.0" if q_live != TRUE else "",
        "gradient_lines": lines,
        "part": part,
        "factor": "" if is_one(g.factor) else f" * {kernels.scalar(g.factor, printer)}",
    }


def _conditions(loop: TileLoop, printer: Printer, in_loop: bool) -> list[str]:
    """Which positions of each side of a tile are there, and its mask: computed in the loop, or before it."""
    program, names = loop.program, {"q_live": "outer_live", "kv_live": "inner_live"}
    own = {name: printer.own(program.results[result]) for name, result in names.items()}
    own |= {"mask": printer.tile(program.results["mask"])}
    return [
        f"{name} = {text}"
        for name, text in own.items()
        if (node := program.results[names.get(name, name)]) != TRUE and program.place(node).in_loop == in_loop
    ]


def _bounds(plan: AttentionPlan) -> list[_Bound]:
    """Of a tile of both sides: which of its sides may reach past the end."""
    sides = (
        (plan.q, _Bound("q_start + BLOCK_M <= SQ", "(q_idx < SQ)[:, None]")),
        (plan.kv, _Bound("kv_start + BLOCK_N <= SK", "(kv_idx < SK)[None, :]")),
    )
    return [bound for guards, bound in sides if guards.bound != TRUE]


def _inside(printer: Printer) -> Printer:
    """A printer for tiles that no side of reaches past the end."""
    greatest = {"q_idx": {"SQ": 1, "": -1}, "kv_idx": {"SK": 1, "": -1}}
    return replace(printer, ranges=replace(printer.ranges, greatest={**printer.ranges.greatest, **greatest}))


def _in_two(line: str, unguarded: str | None) -> list[str]:
    """A line, or what it is in tiles that are inside of both tensors and in the others."""
    return [line] if unguarded is None else ["if whole:", f"    {unguarded}", "else:", f"    {line}"]
