"""Properties of a delta for verification, as plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Problem:
    """The delta rowsum(dO * O) of attention, with `width` elements in a row of the output."""

    name: str
    dtype: str
    width: int
    passes: tuple[str, ...] = ("delta",)
    kernel: ClassVar[str] = "attention"
    part: ClassVar[str | None] = "delta"


def problem_of(loaded: Any) -> Problem:
    """Return the problem of an attention spec with a delta."""
    return Problem(f"{loaded.spec.name}_delta", loaded.spec.dtype, loaded.spec.head_dim.v)
