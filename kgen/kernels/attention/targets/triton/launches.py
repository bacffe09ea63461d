"""The launches that the launcher spells out."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.kernels.attention.lowered.model import KernelParams, Operands
from kgen.targets.folding import Bracketed


@dataclass(frozen=True)
class Launch:
    """The launch of a kernel that loops over tiles, of which TMA may load some."""

    kernel: str
    tiles: str
    """The table of tiles."""
    programs: str
    params: KernelParams
    operands: Operands

    @property
    def described(self) -> Bracketed:
        """The line that makes descriptors."""
        names = ", ".join(self.operands.descs)
        return Bracketed(f"{names} = _descriptors(", ("tile", *self.operands.blocks), ")")


@dataclass(frozen=True)
class DeltaLaunch:
    """The launch of the kernel of delta."""

    params: KernelParams
    programs: str
    options: list[str]
    """The further options of the launch."""
    counts: bool
    """True where the kernel resets counters of tiles."""

    @property
    def no_strides(self) -> str:
        """The strides of dlse where there is none."""
        *_, of_dlse = self.params.strides
        return f"({', '.join('0' for _ in of_dlse)})"


@dataclass(frozen=True)
class GradientLaunch:
    """The launch of a kernel for the gradient of a buffer."""

    name: str
    params: KernelParams
    times: str | None
    """How many programs a tile of positions has; None for one."""


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
    """None where other schedules have all calls."""
    backward: BackwardLaunches | None
