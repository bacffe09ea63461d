"""Element types of emitted C++."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from kgen.targets.code import CUDA
from kgen.targets.template import Template

ELEMENTS = {"fp32": "float", "bf16": "bf16", "fp16": "fp16", "fp8_e4m3": "fp8_e4m3"}
"""By the name of the dtype in a spec."""


@dataclass(frozen=True)
class Elements(Template):
    """The element types that a file defines, and what it does with them."""

    template: ClassVar[str] = "cuda/_elements.j2"
    language: ClassVar[str] = CUDA

    fp32: bool
    """True where float32 is an element of a tensor, not of sums alone."""
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

    @property
    def reads_others(self) -> bool:
        """True where elements of other types than bf16 are read."""
        return self.fp32 or self.fp16


def used(dtypes: Collection[str], **more: bool) -> Elements:
    """The definitions of a file whose tensors have these dtypes of a spec."""
    return Elements(**{name: name in dtypes for name in ELEMENTS}, **more)
