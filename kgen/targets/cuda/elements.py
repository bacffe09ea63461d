"""Element types of emitted C++."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from kgen.targets.code import CUDA
from kgen.targets.template import Template

ELEMENTS = {"fp32": "float", "bf16": "bf16", "fp16": "fp16", "fp8_e4m3": "fp8_e4m3"}
"""C++ types of elements, by the name of the dtype in a spec."""


@dataclass(frozen=True)
class Elements(Template):
    """The element types that a file defines, and the operations on them."""

    template: ClassVar[str] = "cuda/_elements.j2"
    language: ClassVar[str] = CUDA

    fp32: bool
    """True if a tensor has elements of float32; sums always have."""
    bf16: bool
    fp16: bool
    fp8_e4m3: bool
    loaded_once: bool = False
    """True if vectors are loaded without L1."""
    rounds: bool = False
    """True if results are rounded to an element type when they are stored."""
    rounded: bool = False
    """True if values are rounded to an element type for further computation."""
    stores_fp32: bool = False
    """True if vectors of float32 are stored."""

    @property
    def reads_others(self) -> bool:
        """True if elements of other types than bf16 are loaded."""
        return self.fp32 or self.fp16


def used(dtypes: Collection[str], **more: bool) -> Elements:
    """Return the definitions of a file whose tensors have these dtypes."""
    return Elements(**{name: name in dtypes for name in ELEMENTS}, **more)
