"""The interface of the kernels for one chip.

Parts are imported lazily: a plan needs no templates.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.family import Chip, Lazy


@dataclass(frozen=True)
class Schedule:
    """The kernels for one chip. Their templates are in `templates/linear_attention/<name>/`."""

    name: str
    chip: Chip
    missing: Lazy
    """`(LinearAttentionPlan) -> str | None`: the reason why a spec has no such kernels."""
    explained: Lazy
    """`(LinearAttentionPlan) -> str`: a sentence about the kernels, or why there are none."""
    made: Lazy
    """`(Builder, Kernels, Call) -> Made` of `targets/triton/made.py`: the parts of the files."""
