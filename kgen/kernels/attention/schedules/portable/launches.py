"""How the launcher launches each of the portable kernels."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.kernels.attention.lowered.model import KernelParams, Operands, arguments
from kgen.kernels.attention.lowered.params import PAGES
from kgen.kernels.attention.schedules.portable.kernels import BackwardKernels, Decode, PortableKernels
from kgen.kernels.attention.targets.triton.placement import Placement


@dataclass(frozen=True)
class Launch:
    """The launch of a kernel that loops over tiles, of which TMA may load some."""

    kernel: str
    tiles: str
    """The table of tiles."""
    programs: str
    params: KernelParams
    operands: Operands


@dataclass(frozen=True)
class DeltaLaunch:
    """The launch of the kernel of delta."""

    params: KernelParams
    programs: str
    begins_another: bool
    """True where a kernel may begin beside the end of this one."""

    counts: bool
    """True where that one counts its tiles."""

    @property
    def options(self) -> list[str]:
        """The further options of the launch."""
        return ["BEFORE_HOPPER=on_hopper"] if self.begins_another else []


@dataclass(frozen=True)
class GradientLaunch:
    """The launch of a kernel for the gradient of a buffer."""

    name: str
    params: KernelParams
    times: str | None
    """How many programs a tile of positions has; None for one."""


@dataclass(frozen=True)
class DecodeLaunch:
    """The launches of the kernels for few queries."""

    of: Decode

    @property
    def params(self) -> KernelParams:
        """The parameters of the kernel for a share of the keys."""
        return self.of.params

    @property
    def combine_params(self) -> KernelParams:
        """The parameters of the kernel that merges shares."""
        return self.of.combine_params

    @property
    def balanced(self) -> bool:
        """True where sequences of different lengths share out the splits."""
        return self.of.decode.balanced

    @property
    def pages(self) -> list[str]:
        """The arguments for pages; none without them."""
        return arguments(PAGES) if self.of.decode.paged else []


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
    """The launches of all kernels of a file."""

    forward: Launch
    decode: DecodeLaunch | None
    backward: BackwardLaunches | None


def launches_of(kernels: PortableKernels, at: Placement) -> Launches:
    """The launches of kernels."""
    of = kernels.forward
    forward = Launch("_forward_kernel", "_FORWARD_TILES", at.programs.q, of.params, of.kernel.operands)
    backward = _backward(kernels.backward, at) if kernels.backward is not None else None
    return Launches(forward, DecodeLaunch(kernels.decode) if kernels.decode else None, backward)


def _backward(of: BackwardKernels, at: Placement) -> BackwardLaunches:
    delta, dq, dkdv = of.delta, of.dq, of.dkdv
    return BackwardLaunches(
        delta=DeltaLaunch(delta.params, at.of.delta.programs, delta.begins_another, delta.counts),
        dq=Launch("_dq_kernel", "_DQ_TILES", at.programs.q, dq.params, dq.kernel.operands),
        dkdv=Launch("_dkdv_kernel", "_DKDV_TILES", at.programs.kv, dkdv.params, dkdv.kernel.operands),
        pairs=[GradientLaunch(x.tile.name, x.params, x.kernel.shared.programs) for x in of.pairs],
        diagonals=[GradientLaunch(x.tile.name, x.params, None) for x in of.diagonals],
    )
