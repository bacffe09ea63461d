"""The page of `kgen explain` for norms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kgen.expr.nodes import Node
from kgen.expr.operations import operations
from kgen.expr.unparse import show
from kgen.kernels.norm.plan.planning import Gradient, NormPlan, Operand, Value, plan_norm
from kgen.pages.model import Block, Code, Drawing, Line, Lines, Page, Prose, Section, words
from kgen.pages.tables import counts
from kgen.sizes import ELEMENT_SIZE
from kgen.spec.load import Loaded

ALONG = {
    "element": "for every element",
    "row": "summed over each row",
    "column": "summed over the rows",
}


def explain_norm(loaded: Loaded, _drawing: Drawing | None = None) -> Page:
    """Build the page: the values of each pass, the gradients and the counts of operations.

    It has no drawing.
    """
    plan = plan_norm(loaded)
    sections: dict[str, Iterable[Block]] = {"Forward, for each row": _forward(plan)}
    if plan.backward is not None:
        sections["Backward, for each row"] = _backward(plan)
        sections["Gradients"] = [_gradient(one) for one in plan.backward.gradients]
    sections["Operations for each element"] = _operations(plan, loaded.trees)
    return Page(
        plan.spec.name,
        plan.spec.summary.on_terminal(),
        tuple(Section(title, tuple(blocks)) for title, blocks in sections.items()),
        _facts(plan),
    )


def _facts(plan: NormPlan) -> dict[str, Any]:
    """Return the fields of the JSON output, which docs/commands.md lists."""
    values = [plan.forward.h, *plan.forward.normed, plan.forward.out]
    gradients = plan.backward.gradients if plan.backward is not None else ()
    return {
        "operands": [{"name": o.name, "dtype": o.dtype, "along": o.along} for o in plan.operands],
        "forward": [
            {"name": v.name, "value": show(v.tree), "rounded_to": v.rounded} for v in values
        ],
        "saved": list(plan.saves),
        "gradients": [
            {
                "of": g.of,
                "value": show(g.tree),
                "along": g.along,
                "dtype": g.dtype,
                "same_as": g.same_as,
            }
            for g in gradients
        ],
    }


def _forward(plan: NormPlan) -> Iterator[Block]:
    forward = plan.forward
    yield _reads(o.name for o in forward.loads)
    around = "(h - mean)" if plan.layer else "h"
    yield Lines(
        (
            *_values([forward.h]),
            *([Line("mean = sum(h) / WIDTH")] if plan.layer else []),
            Line(f"rstd = 1 / sqrt(sum({around}**2) / WIDTH + eps)"),
            *_values([*forward.normed, forward.out]),
        )
    )
    if plan.saves:
        saved = Code(" and ".join(plan.saves))
        yield Prose(words("saves ", saved, " for backward, if a gradient is required"))


def _backward(plan: NormPlan) -> Iterator[Block]:
    backward = plan.backward
    assert backward is not None
    yield _reads([*(o.name for o in (*backward.loads, *plan.upstream)), *plan.saves])
    means = (Line(f"{mean.name} = sum({show(mean.tree)}) / WIDTH") for mean in backward.means)
    yield Lines((*_values(backward.before), *means, *_values([backward.dh])))


def _reads(names: Iterable[str]) -> Prose:
    return Prose(words("reads ", Code(", ".join(names))))


def _values(values: Iterable[Value]) -> Iterator[Line]:
    for v in values:
        yield Line(f"{v.name} = {show(v.tree)}", f"rounded to {v.rounded}" if v.rounded else "")


def _gradient(gradient: Gradient) -> Block:
    if gradient.same_as is not None:
        return Prose(
            words(Code(gradient.name), " is ", Code(f"d{gradient.same_as}"), ", stored once")
        )
    note = f"{ALONG[gradient.along]}, in {gradient.dtype}"
    return Lines((Line(f"{gradient.name} = {show(gradient.tree)}", note),))


def _operations(plan: NormPlan, written: Mapping[str, Node]) -> Iterator[Block]:
    """Count arithmetic operations, and bytes of the tensors that have the shape of x."""
    forward, backward = plan.forward, plan.backward
    mods = [written.get("input_mod", forward.h.tree), written.get("output_mod", forward.out.tree)]
    trees = [v.tree for v in (forward.h, *forward.normed, forward.out)]
    columns = {
        "forward, as written": [*mods, *(v.tree for v in forward.normed)],
        "forward": trees,
    }
    loads = {"forward": [*forward.loads]}
    stores = {"forward": [forward.out.rounded, *([forward.h.rounded] if plan.stores_h else [])]}
    if backward is not None:
        values = [*backward.before, *backward.means, backward.dh]
        columns["backward"] = [*(v.tree for v in values), *(g.tree for g in backward.gradients)]
        loads["backward"] = [*backward.loads, *plan.upstream]
        stores["backward"] = [gradient.dtype for gradient in backward.elements]
    moved = {name: _bytes(loads[name], stores[name]) for name in loads}
    yield counts({name: operations(trees) for name, trees in columns.items()}, {"bytes": moved})
    yield Prose(
        words(
            "Bytes are those of tensors with an element for each of x, read once and written "
            "once.\n"
            "Sums over the row come on top, and what is read once for each row or column."
        )
    )


def _bytes(loads: Iterable[Operand], stored: Iterable[str | None]) -> int:
    read = (o.dtype for o in loads if o.along == "element")
    return sum(ELEMENT_SIZE[dtype] for dtype in (*read, *stored) if dtype is not None)
