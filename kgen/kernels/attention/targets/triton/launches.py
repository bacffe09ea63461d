"""The kernel launches that the launcher contains."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.attention.lowered.model import KernelParams, Operands
from kgen.kernels.attention.targets.triton.exact import Exact
from kgen.targets.code import Code, If, Run, Statement, text
from kgen.targets.folding import Bracketed
from kgen.targets.template import Template


@dataclass(frozen=True)
class Launch(KernelParams):
    """The launch of a kernel that loops over tiles. TMA may load some of them."""

    kernel: str
    tiles: str
    """The table of tiles."""
    programs: str
    operands: Operands

    @property
    def by_tma(self) -> list[str]:
        """The tensors that TMA must be able to load."""
        return self.operands.tensors

    @property
    def described(self) -> Bracketed:
        """The statement that builds TMA descriptors."""
        names = ", ".join(self.operands.descs)
        return Bracketed(f"{names} = _descriptors(", ("tile", *self.operands.blocks), ")")


@dataclass(frozen=True)
class DeltaLaunch(KernelParams, Exact, Template):
    """The launch of the kernel of delta."""

    template: ClassVar[str] = "attention/triton/_delta_launch.j2"

    programs: str
    options: list[str]
    """Further launch options."""

    def launch_functions(self) -> Iterable[str]:
        return ("_cdiv", "_launch")

    @property
    def no_strides(self) -> str:
        """The stride arguments of dlse if dlse is None."""
        *_, of_dlse = self.strides
        return f"({', '.join('0' for _ in of_dlse)})"


@dataclass(frozen=True)
class OwnDelta(Template):
    """The computation of delta by its kernel."""

    template: ClassVar[str] = "attention/triton/_own_delta.j2"

    needed: str
    """The condition under which a call computes delta."""
    launch: DeltaLaunch


@dataclass(frozen=True)
class OutsideDelta(Template):
    """The computation of delta by the function that `use_delta` set, or else by its kernel."""

    template: ClassVar[str] = "attention/triton/_outside_delta.j2"

    name: str
    counters_zeroed: list[Statement]
    """The statements that reset tile counters, as the kernel of delta does."""
    launch: DeltaLaunch


def counters_zeroed() -> list[Statement]:
    """Return the statements that reset the tile counters of a call that has them."""
    return [If(text("counters is not None"), (Run(text("counters.zero_()")),))]


@dataclass(frozen=True)
class GradientLaunch(KernelParams):
    """The launch of a kernel for the gradient of a buffer."""

    kernel: str
    tiles: str
    """The table of tiles."""
    programs: Code
    needed: str
    """The condition under which a call launches the kernel."""


@dataclass(frozen=True)
class BackwardLaunches:
    """The launches of the backward pass."""

    delta: DeltaLaunch
    counts: bool
    """True if the kernel of delta resets tile counters."""
    dq: Launch
    dkdv: Launch
    of_buffers: list[GradientLaunch]


@dataclass(frozen=True)
class Launches:
    """The launches of both passes."""

    forward: Launch | None
    """The forward launch. None if other schedules serve all calls."""
    backward: BackwardLaunches | None
