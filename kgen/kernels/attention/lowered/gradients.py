"""The statements of a backward loop after `ds`, the gradient of the modified score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kgen.expr.differentiate import is_one
from kgen.expr.mask_form import TRUE
from kgen.expr.nodes import Type, Var
from kgen.kernels.attention.lowered.lowering import INFINITY, Lowering, strides_of
from kgen.kernels.attention.lowered.model import Gradients, Param, RowGradient
from kgen.kernels.attention.plan.model import ReadGradient, TileLoop
from kgen.targets.code import Assign, Code, If, Name, Run, Statement, assign, atom, op, row, times
from kgen.targets.triton.printer import Printer


def gradients_of(lowering: Lowering, loop: TileLoop, printer: Printer) -> Gradients:
    """Build the gradients of a loop: of q @ k^T, and of the buffers that the score reads."""
    kept = [g for g in loop.gradients if g.along != "pair"]
    scattered = [g for g in loop.gradients if g.along == "pair"]
    of = _products(lowering, loop, printer, kept)
    products, parts, open_ended = of.products, of.parts, of.open_ended
    dqk = "ds" if is_one(loop.dscore) else "dqk"
    # Only a part that is masked again needs a name.
    inline = {p: v for p, v in products.items() if p not in (*open_ended, dqk)}
    lines: list[Statement] = [
        line for g in scattered for line in _scattered(lowering, loop, printer, g)
    ]
    lines += [assign(name, value) for name, value in products.items() if name not in inline]
    if open_ended:
        lines.append(If(Name("MASKED"), tuple(_where_masked(name) for name in open_ended)))
    lines += [_summed(name, inline.get(part, Name(part))) for name, part in parts.items()]
    return Gradients(
        gradient_lines=lines,
        products=[assign(name, value) for name, value in products.items()],
        masked_late=list(dict.fromkeys([*parts.values(), dqk])),
        sums=[_summed(name, Name(part)) for name, part in parts.items()],
        open_ended=bool(open_ended),
        dqk=dqk,
        factor=lowering.product([Var("scale", Type.FLOAT), loop.dscore_factor], printer),
        factor_may_be_nan=lowering.may_be_nan(loop.dscore_factor),
        row_gradients=tuple(
            RowGradient(f"d_{g.name}", lowering.scaled(f"d_{g.name}", g, printer)) for g in kept
        ),
        gradient_params=_params(kept, scattered),
        also=[
            f"and {a}" for a in dict.fromkeys(f"the gradient of {g.buffer}" for g in loop.gradients)
        ],
    )


@dataclass(frozen=True)
class _Products:
    """The products of `ds` with derivatives in a tile."""

    products: dict[str, Code]
    """Products by name."""
    parts: dict[str, str]
    """Names of products by the gradient that sums them."""
    open_ended: list[str]
    """Products that must be masked again, because a hidden pair may be NaN."""


def _products(
    lowering: Lowering, loop: TileLoop, printer: Printer, kept: Sequence[ReadGradient]
) -> _Products:
    products, parts, open_ended = dict[str, Code](), dict[str, str](), list[str]()
    for g in kept:
        parts[g.name] = "ds"
        if not is_one(g.derivative):
            parts[g.name] = part = f"part_{g.name}"
            products[part] = times("ds", printer.tile(loop.program.results[f"d_{g.name}"]))
            if loop.masked and lowering.may_be_nan(g.derivative):
                open_ended.append(part)
    if not is_one(loop.dscore):
        products["dqk"] = times("ds", printer.tile(loop.program.results["dscore"]))
        if loop.masked and lowering.may_be_nan(loop.dscore):
            open_ended.append("dqk")
    return _Products(products, parts, open_ended)


def _params(kept: Sequence[ReadGradient], scattered: Sequence[ReadGradient]) -> tuple[Param, ...]:
    """Return the parameters for the gradients of buffers that a kernel writes."""
    found = [Param(f"d_{g.name}_ptr", f"d_{g.name}") for g in kept]
    for g in scattered:
        rank = len(g.indices)
        found += [
            Param(f"d_{g.name}_ptr", f"d_{g.name}"),
            *strides_of(f"d_{g.name}", rank, wide=rank),
        ]
    return tuple(found)


def _scattered(
    lowering: Lowering, loop: TileLoop, printer: Printer, g: ReadGradient
) -> list[Statement]:
    """Return the statements that add a gradient per pair to the elements of the buffer, by atomic
    additions.
    """
    lines, part = contribution(lowering, loop, printer, g)
    indices = tuple(loop.program.results[f"d_{g.name}[{i}]"] for i in range(len(g.indices)))
    address = printer.address(f"d_{g.name}", indices, ("q", "kv"))
    inside = printer.guard(g.buffer, indices, ("q", "kv"))
    if loop.program.results["outer_live"] != TRUE:
        of_rows = op("({0})[:, None]", row("lt", "lse", INFINITY))
        inside = of_rows if inside is None else op("{0} & ({1})", of_rows, inside)
    if not is_one(g.factor):
        part = op("{0} * {1}", part, atom(lowering.scalar(g.factor, printer)))

    def added(guard: Code | None) -> Run:
        if guard is None:
            return Run(op("{tl}.atomic_add({0}, {1})", address, part))
        return Run(op("{tl}.atomic_add({0}, {1}, mask={2})", address, part, guard))

    if not loop.masked:
        return [*lines, added(inside)]
    both = Name("mask") if inside is None else op("{0} & ({1})", "mask", inside)
    return [*lines, If(Name("MASKED"), (added(both),), (added(inside),))]


def contribution(
    lowering: Lowering, loop: TileLoop, printer: Printer, g: ReadGradient
) -> tuple[list[Statement], Code]:
    """Return the statements for a tile's part of the gradient of a read, and the part before its
    sum.
    """
    if is_one(g.derivative):
        return [], Name("ds")
    part = times("ds", printer.tile(loop.program.results[f"d_{g.name}"]))
    if not (loop.masked and lowering.may_be_nan(g.derivative)):
        return [], part
    return [assign("part", part), If(Name("MASKED"), (_where_masked("part"),))], Name("part")


def _where_masked(name: str) -> Assign:
    return assign(name, op("{tl}.where({0}, {1}, 0.0)", "mask", name))


def _summed(name: str, part: Code) -> Assign:
    """Return the statement that adds the row sums of a tile to the gradient of a buffer."""
    return Assign((f"d_{name}",), (op("{tl}.sum({0}, 1)", part),), "+=")
