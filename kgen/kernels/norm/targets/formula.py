"""The formula of a norm, for docstrings and comments."""

from __future__ import annotations

from kgen.expr.unparse import show
from kgen.kernels.norm.plan.planning import NormPlan, Value


def formula(plan: NormPlan) -> list[str]:
    """Return the formula, one line per value."""
    forward = plan.forward
    inner = "mean((h - mean(h))**2)" if plan.layer else "mean(h**2)"
    values = [forward.h, *forward.normed, Value("out", forward.out.tree)]
    lines = []
    for v in values:
        text = show(v.tree)
        if v.name == "x_hat":
            text = f"{'(h - mean(h))' if plan.layer else 'h'} / sqrt({inner} + eps)"
        lines.append(f"{v.name} = {text}" + (f", rounded to {v.rounded}" if v.rounded else ""))
    return lines
