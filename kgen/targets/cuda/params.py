"""Parameters of CUDA kernels, as kernels, C launchers and Python have them."""

from __future__ import annotations

from dataclasses import dataclass

OF_FILE = ("bf16", "fp16", "fp8_e4m3")
"""Types that the file defines, which C has not."""


@dataclass(frozen=True)
class Param:
    """A parameter of a kernel: a number, or a pointer to elements of a type. `given` is what Python passes."""

    type: str
    name: str
    given: str = ""
    is_pointer: bool = False
    const: bool = False

    @property
    def device(self) -> str:
        """As the kernel has it."""
        return f"{'const ' * self.const}{self.type}{'* __restrict__' * self.is_pointer} {self.name}"

    @property
    def host(self) -> str:
        """As its C launcher has it."""
        own = "void" if self.is_pointer and self.type in OF_FILE else self.type
        return f"{'const ' * self.const}{own}{'*' * self.is_pointer} {self.name}"


Params = list[list[Param]]
"""Parameters, a line at a time."""


def pointer(element: str, name: str, tensor: str, const: bool = False) -> Param:
    """One to the elements of a tensor of the launcher, or to floats."""
    return Param(element, name, f"{tensor}.data_ptr()", is_pointer=True, const=const)


def device(params: Params) -> str:
    """The parameters of a kernel."""
    return ",\n".join(", ".join(p.device for p in line) for line in params)


def host(params: Params) -> str:
    """The same of a C launcher."""
    return ",\n".join(", ".join(p.host for p in line) for line in params)


def names(params: Params) -> tuple[str, ...]:
    """What the C launcher passes for them."""
    return tuple(p.name for line in params for p in line)


def given(params: Params) -> list[str]:
    """What Python passes for them."""
    return [p.given for line in params for p in line if p.given]
