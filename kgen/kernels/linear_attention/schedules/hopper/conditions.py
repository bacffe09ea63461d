"""The specs that have forward kernels for Hopper, and the factors of tokens in them."""

from __future__ import annotations

from kgen.kernels.linear_attention.plan.planning import LinearAttentionPlan

CHUNK = 64
"""The tokens of a chunk, and the rows of an accumulator of wgmma."""
WIDTHS = (64, 128)
"""The columns of keys for which the state of 64 columns of v fits into registers."""


def without_kernels(plan: LinearAttentionPlan) -> str | None:
    """Return the reason why a spec has no kernels for Hopper, or None."""
    spec = plan.spec
    reasons = {
        "the rule is `add`, not `delta`": not plan.delta,
        "the decay varies along the columns of the keys": plan.by_column,
        "sequences are packed": spec.varlen,
        "the output has a `skip`": "skip" in plan.formulas,
        f"heads of q and k have {spec.head_dim.qk} columns": spec.head_dim.qk not in WIDTHS,
        f"chunks have {spec.chunk_size} tokens, not {CHUNK}": spec.chunk_size != CHUNK,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def factors(plan: LinearAttentionPlan) -> tuple[str, ...]:
    """Return the numbers of each token that the kernel of the recurrence loads, in order.

    `betas` are the factors of updates. `before` multiplies the value that the state before the
    chunk has for a key, `queried` the one for a query. `after` decays an update to the end of the
    chunk, `last` the state.
    """
    betas = ("betas",) if "beta" in plan.formulas else ()
    return (*betas, *(("before", "queried", "after", "last") if "decay" in plan.formulas else ()))
