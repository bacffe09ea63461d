"""What verification needs to know of a delta, as plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Problem:
    """rowsum(dO * O) of attention with `width` elements in a row of its output."""

    name: str
    dtype: str
    width: int
    passes: tuple[str, ...] = ("delta",)
    kernel: ClassVar[str] = "attention"
    part: ClassVar[str | None] = "delta"


def problem_of(loaded: Any) -> Problem:
    """The problem of an attention spec that asks for a delta."""
    return Problem(f"{loaded.spec.name}_delta", loaded.spec.dtype, loaded.spec.head_dim.v)
