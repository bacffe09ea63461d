"""The kernel launches that the launcher contains."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.kernels.attention.lowered.model import KernelParams, Operands
from kgen.targets.code import Code
from kgen.targets.folding import Bracketed


@dataclass(frozen=True)
class Launch:
    """The launch of a kernel that loops over tiles. TMA may load some of them."""

    kernel: str
    tiles: str
    """The table of tiles."""
    programs: str
    params: KernelParams
    operands: Operands

    @property
    def described(self) -> Bracketed:
        """The statement that builds TMA descriptors."""
        names = ", ".join(self.operands.descs)
        return Bracketed(f"{names} = _descriptors(", ("tile", *self.operands.blocks), ")")


@dataclass(frozen=True)
class DeltaLaunch:
    """The launch of the kernel of delta."""

    params: KernelParams
    programs: str
    options: list[str]
    """Further launch options."""
    counts: bool
    """True if the kernel resets tile counters."""

    @property
    def no_strides(self) -> str:
        """The stride arguments of dlse if dlse is None."""
        *_, of_dlse = self.params.strides
        return f"({', '.join('0' for _ in of_dlse)})"


@dataclass(frozen=True)
class GradientLaunch:
    """The launch of a kernel for the gradient of a buffer."""

    name: str
    params: KernelParams
    times: Code | None
    """Number of programs per tile of positions. None for one."""


@dataclass(frozen=True)
class BackwardLaunches:
    """The launches of the backward pass."""

    delta: DeltaLaunch
    dq: Launch
    dkdv: Launch
    pairs: list[GradientLaunch]
    diagonals: list[GradientLaunch]


@dataclass(frozen=True)
class Launches:
    """The launches of both passes."""

    forward: Launch | None
    """The forward launch. None if other schedules serve all calls."""
    backward: BackwardLaunches | None
