"""Bounds below the noise of an output: a wrong factor of the output or of a term, and a wrong
rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

RATIO = 1.35
SIGMAS = 6.0
BEFORE_ROUNDING = 1e-3
"""Allowed relative error of an element before rounding. float32 arithmetic causes 1 % of it."""
OF_TERMS = 5e-6
"""Allowed error before rounding, relative to a row before cancellation: the noise of float32."""


def wrong_factor(
    what: str,
    got: Tensor,
    want: Tensor,
    eager: Tensor,
    term: Tensor,
    slack: float,
    by_row: bool = False,
) -> str | None:
    """A message if a term of `want` has a wrong factor in `got`.

    Rounding errors have no direction, so their sum along the term stays near zero. The bound is
    `RATIO` times the sum that the eager computation has, plus `slack`, plus `SIGMAS` standard
    deviations. These come from the eager errors, as if all elements were independent and alike.
    With `by_row` they come from the eager errors where the term is: as if elements were
    independent, or rows. The larger of the two counts.
    """
    whole = float(term.square().sum())
    if not whole:
        return None
    off, plain = ((x - want) * term for x in (got, eager))
    factor, yardstick = (float(x.sum()) / whole for x in (off, plain))
    if by_row:
        spread = max(float(plain.norm()), float(plain.sum(-1).norm())) / whole
    else:
        # Elements that are large have more of the weight: as many count as if all were alike.
        count = whole**2 / float(term.square().square().sum())
        spread = float((eager - want).norm()) / math.sqrt(whole * count)
    if abs(factor) <= RATIO * abs(yardstick) + SIGMAS * spread + slack / math.sqrt(whole):
        return None
    return f"{what} is off by a factor of {1 + factor:.5f}, eager by one of {1 + yardstick:.5f}"


def misrounded(got: Tensor, want: Tensor, terms: Tensor, dtype: torch.dtype) -> str | None:
    """A message if an element is off by more than half a unit in the last place of `dtype`.

    `terms` has the norm of each row before anything cancels.
    """
    kind = torch.finfo(dtype)
    half = kind.eps / 2 * want.abs().clamp_min(kind.smallest_normal).log2().floor().exp2()
    allowed = half + BEFORE_ROUNDING * want.abs() + OF_TERMS * terms[..., None]
    wrong = (got - want).abs() > allowed
    if not wrong.any():
        return None
    worst = int(((got - want).abs() / allowed).argmax())
    value, truth = (float(x.flatten()[worst]) for x in (got, want))
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements are not rounded to the nearest: "
        f"{value:g} for {truth:g}"
    )
