"""What becomes of the spec of a norm, step by step, in words for the person who wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kgen.expr.show import show
from kgen.kernels.norm.plan.planning import Gradient, NormPlan, Value, plan_norm
from kgen.spec.load import Loaded

ALONG = {"element": "for every element", "row": "summed over each row", "column": "summed over the rows"}


def explain_norm(loaded: Loaded, _length: int | None = None) -> str:
    """The steps from a spec to its kernels, as plain text."""
    plan = plan_norm(loaded)
    sections = {"Forward, for each row": _forward(plan)}
    if plan.backward is not None:
        sections["Backward, for each row"] = _backward(plan)
        sections["Gradients"] = map(_gradient, plan.backward.gradients)
    title = f"{plan.spec.name}: {plan.spec.summary.on_terminal()}".rstrip(": ")
    texts = ["\n".join([f"{heading}\n", *lines]) for heading, lines in sections.items()]
    return "\n\n".join([title, *texts]) + "\n"


def _forward(plan: NormPlan) -> Iterator[str]:
    forward = plan.forward
    yield f"  reads {', '.join(o.name for o in forward.loads)}"
    yield from _values([forward.h])
    if plan.layer:
        yield "  mean = sum(h) / WIDTH"
    around = "(h - mean)" if plan.layer else "h"
    yield f"  rstd = 1 / sqrt(sum({around}**2) / WIDTH + eps)"
    yield from _values([*forward.normed, forward.out])
    if plan.saves:
        yield f"  saves {' and '.join(plan.saves)} for backward, where a gradient is asked for"


def _backward(plan: NormPlan) -> Iterator[str]:
    assert plan.backward is not None
    reads = [o.name for o in (*plan.backward.loads, *plan.upstream)]
    yield f"  reads {', '.join([*reads, *plan.saves])}"
    yield from _values(plan.backward.before)
    for mean in plan.backward.means:
        yield f"  {mean.name} = sum({show(mean.tree)}) / WIDTH"
    yield from _values([plan.backward.dh])


def _values(values: Iterable[Value]) -> Iterator[str]:
    for v in values:
        yield f"  {v.name} = {show(v.tree)}" + (f", rounded to {v.rounded}" if v.rounded else "")


def _gradient(gradient: Gradient) -> str:
    if gradient.same_as is not None:
        return f"  {gradient.name} is d{gradient.same_as}, stored once"
    return f"  {gradient.name} = {show(gradient.tree)}, {ALONG[gradient.along]}, in {gradient.dtype}"
