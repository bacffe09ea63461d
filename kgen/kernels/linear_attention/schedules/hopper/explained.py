"""Explain the Hopper kernels for `kgen explain`."""

from __future__ import annotations

from kgen.kernels.linear_attention.plan.planning import LinearAttentionPlan
from kgen.kernels.linear_attention.schedules import keeps
from kgen.kernels.linear_attention.schedules.hopper.conditions import without_kernels


def explained(plan: LinearAttentionPlan) -> str:
    """Describe the kernels, or state the reason for none."""
    if (why := without_kernels(plan)) is not None:
        return f"No kernels for Hopper: {why}."
    kept = (
        " Without gradients, it stores no tensor for backward. Backward has its own kernels, too: "
        "one for P, one in Gluon for gradients of states, and one for other gradients of a chunk."
    )
    return (
        "On sm_90, if TMA can load q, k and v, forward runs its own kernels: one for the maps of q "
        "and k, equations and P, and one in Gluon for solve, states and output."
        f"{kept if keeps(plan) else ''}"
    )
