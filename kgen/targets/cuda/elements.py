"""Element types as `templates/cuda/_elements.j2` names them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

ELEMENTS = {"fp32": "float", "bf16": "bf16", "fp16": "fp16", "fp8_e4m3": "fp8_e4m3"}
"""By the name of the dtype in a spec."""


@dataclass(frozen=True)
class Elements:
    """Which element types a file has to define, and what else of `_elements.j2` it needs."""

    fp32: bool
    bf16: bool
    fp16: bool
    fp8_e4m3: bool
    loaded_once: bool = False
    """True where vectors are read past the cache."""
    rounds: bool = False
    """True where results are rounded to an element type when they are stored."""
    rounded: bool = False
    """True where values are rounded to an element type and computed with."""
    stores_fp32: bool = False
    """True where float32 is stored in vectors."""


def used(dtypes: Collection[str], **more: bool) -> Elements:
    """What a file defines whose tensors have these dtypes of a spec."""
    return Elements(**{name: name in dtypes for name in ELEMENTS}, **more)
