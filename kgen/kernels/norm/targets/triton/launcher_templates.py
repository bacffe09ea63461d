"""The templates of a norm's launcher in Triton, with their fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.norm.targets.arguments import FP8, Check
from kgen.kernels.norm.targets.function import NormDocstring, NormFunction
from kgen.targets.code import Code, Statement
from kgen.targets.launching import LaunchFunctions
from kgen.targets.template import Template


@dataclass(frozen=True)
class RowSchedule(Template):
    """The schedule for rows; several programs may share a row."""

    template: ClassVar[str] = "norm/triton/_row_schedule.j2"

    name: str

    def launch_functions(self) -> Iterable[str]:
        return ("_cdiv", "_next_power_of_2")


@dataclass(frozen=True)
class HeadSchedule(Template):
    """The schedule for positions with heads; each program has some heads."""

    template: ClassVar[str] = "norm/triton/_head_schedule.j2"

    def launch_functions(self) -> Iterable[str]:
        return ("_cdiv", "_next_power_of_2")


@dataclass(frozen=True)
class Output:
    """A tensor that a kernel writes."""

    name: str
    shape: str
    dtype: str
    like: str
    """A tensor on the same device."""

    @property
    def narrow(self) -> bool:
        """True if Triton's interpreter does not round to the dtype."""
        return self.dtype in ("bfloat16", *FP8.values())

    @property
    def empty(self) -> str:
        """The allocation."""
        dtype = f"torch.{self.dtype}"
        stored = f"_stored({dtype}, {self.like}.device)" if self.narrow else dtype
        return f"{self.like}.new_empty({self.shape}, dtype={stored})"

    @property
    def rounded(self) -> str:
        """The tensor, converted to its dtype."""
        return f"{self.name}.to(torch.{self.dtype})" if self.narrow else self.name


@dataclass(frozen=True)
class Call:
    """The launch arguments of a kernel, in order."""

    pointers: str
    strides: str
    scalars: str


@dataclass(frozen=True)
class ForwardOperator(Template):
    """The operator of the forward pass."""

    template: ClassVar[str] = "norm/triton/_forward_operator.j2"

    name: str
    params: str
    outputs: tuple[Output, ...]
    rows: tuple[str, ...]
    """Lines that prepare tensors for the kernel."""
    scheduled: str
    """The names of the results of `_schedule`."""
    call: Call
    flags: tuple[str, ...]

    def launch_functions(self) -> Iterable[str]:
        return ("_operator",)

    @property
    def types(self) -> str:
        return ", ".join("Tensor" for _ in self.outputs)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(o.name for o in self.outputs)

    @property
    def rounded(self) -> tuple[str, ...]:
        return tuple(o.rounded for o in self.outputs)


@dataclass(frozen=True)
class BackwardOperator(Template):
    """The operator of the backward pass, and its registration with autograd."""

    template: ClassVar[str] = "norm/triton/_backward_operator.j2"

    name: str
    params: str
    first: str
    """A tensor with the shape of x."""
    gradients: tuple[Output, ...]
    rows: tuple[str, ...]
    programs: Statement
    """The statement that raises the numbers of groups and programs to at least 1, for calls without
    rows.
    """
    call: Call
    sums: tuple[str, ...]
    """The gradients that are sums over rows."""
    inputs: str
    """The arguments of the forward operator."""
    outputs: tuple[str, ...]
    saved: tuple[str, ...]
    """The tensors that autograd saves."""
    scalars: str
    """The numbers that autograd saves."""
    upstream: str
    arguments: str
    """The arguments of the operator."""
    out_dtype: str
    returned: str

    def launch_functions(self) -> Iterator[str]:
        yield from ("_once", "_operator", "_register_autograd")
        if self.sums or "_cdiv" in self.programs.uses:
            yield "_cdiv"

    @property
    def types(self) -> str:
        return ", ".join("Tensor" for _ in self.gradients)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(g.name for g in self.gradients)

    @property
    def rounded(self) -> tuple[str, ...]:
        return tuple(g.rounded for g in self.gradients)

    @property
    def parts(self) -> str:
        """The launch arguments of the kernel that adds partial sums."""
        return ", ".join([*(f"{name}_parts" for name in self.sums), *self.sums])

    @property
    def size(self) -> str:
        """A tensor with as many elements as each sum."""
        return self.sums[0] if self.sums else ""


@dataclass(frozen=True)
class Docstring(NormDocstring, Template):
    """The docstring of the spec's function without its first line."""

    template: ClassVar[str] = "norm/triton/_docstring.j2"

    arguments: tuple[str, ...]
    returned: str

    @property
    def eps_words(self) -> str:
        return f"the {self.variance}"


@dataclass(frozen=True)
class Function(NormFunction, Template):
    """The spec's function."""

    template: ClassVar[str] = "norm/triton/_function.j2"

    docstring: Docstring
    x_words: str
    dtype: str
    """The dtype of x."""
    checks: tuple[Check, ...]
    save: Code
    """The condition for which statistics are saved."""
    outputs: tuple[str, ...]
    arguments: str
    """The arguments of the operator except `save`."""
    returned: str

    def launch_functions(self) -> Iterator[str]:
        yield from ("_cast", "_dense", "_dtype", "_real")
        yield from self.numbers.launch_functions()
        yield from self.derivatives.launch_functions()
        if "_transformed" in self.save.names:
            yield "_transformed"


@dataclass(frozen=True)
class Launcher(Template):
    """The launcher: schedules, operators and the spec's function."""

    template: ClassVar[str] = "norm/triton/_launcher.j2"

    name: str
    launching: LaunchFunctions | None
    """The functions of all launchers, if the file contains their text."""
    fp8: bool
    shared: bool
    """True if several programs share a row."""
    schedule: RowSchedule | HeadSchedule
    rows: str
    """The shape of x in kernels, in words."""
    reshaped: str
    """The arguments of `reshape` for this shape."""
    rounds: bool
    """True if Triton's interpreter does not round to a dtype."""
    forward: ForwardOperator
    backward: BackwardOperator | None
    function: Function

    def launch_functions(self) -> Iterable[str]:
        return ("_arch_for", "_library")
