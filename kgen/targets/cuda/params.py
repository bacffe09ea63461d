"""Parameters of CUDA kernels, for the kernel, its C launcher and the Python launcher."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kgen.targets.folding import COLUMNS, filled

INDENT = 24
"""Columns that templates put before and after the lines of parameters."""
OF_FILE = ("bf16", "fp16", "fp8_e4m3")
"""Types that the .cu file defines; C callers do not have them."""


@dataclass(frozen=True)
class Param:
    """A parameter of a kernel: a number, or a pointer to elements.

    `given` is the argument in Python.
    """

    type: str
    name: str
    given: str = ""
    is_pointer: bool = False
    const: bool = False

    @property
    def device(self) -> str:
        """The declaration in the kernel."""
        return f"{'const ' * self.const}{self.type}{'* __restrict__' * self.is_pointer} {self.name}"

    @property
    def host(self) -> str:
        """The declaration in the C launcher."""
        own = "void" if self.is_pointer and self.type in OF_FILE else self.type
        return f"{'const ' * self.const}{own}{'*' * self.is_pointer} {self.name}"


Params = list[list[Param]]
"""Parameters, by lines of the declaration."""


def pointer(element: str, name: str, tensor: str, const: bool = False) -> Param:
    """Build a parameter that points to the elements of a tensor of the launcher."""
    return Param(element, name, f"{tensor}.data_ptr()", is_pointer=True, const=const)


def device(params: Params) -> str:
    """Print the parameters of a kernel, as many on a line as fit."""
    return _filled(p.device for line in params for p in line)


def host(params: Params) -> str:
    """Print the parameters of a C launcher, as many on a line as fit."""
    return _filled(p.host for line in params for p in line)


def _filled(declared: Iterable[str]) -> str:
    return "\n".join(filled((f"{one}," for one in declared), COLUMNS - INDENT)).removesuffix(",")


def names(params: Params) -> tuple[str, ...]:
    """Return the launch arguments in the C launcher."""
    return tuple(p.name for line in params for p in line)


def given(params: Params) -> list[str]:
    """Return the launch arguments in Python."""
    return [p.given for line in params for p in line if p.given]
