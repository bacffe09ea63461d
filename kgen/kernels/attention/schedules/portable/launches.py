"""Launches of the portable kernels in the launcher."""

from __future__ import annotations

from kgen.kernels.attention.schedules.portable.kernels import BackwardKernels, PortableKernels
from kgen.kernels.attention.targets.triton.launches import (
    BackwardLaunches,
    DeltaLaunch,
    GradientLaunch,
    Launch,
    Launches,
)
from kgen.kernels.attention.targets.triton.placement import Placement


def launches_of(kernels: PortableKernels, at: Placement) -> Launches:
    """Return the launches of the portable kernels."""
    of = kernels.forward
    forward = Launch(
        "_forward_kernel", "_FORWARD_TILES", at.programs_of_q, of.launched, of.kernel.operands
    )
    backward = _backward(kernels.backward, at) if kernels.backward is not None else None
    return Launches(forward if kernels.many_queries else None, backward)


def _backward(of: BackwardKernels, at: Placement) -> BackwardLaunches:
    delta, dq, dkdv = of.delta, of.dq, of.dkdv
    options = [f"START_NEXT={one.when}" for one in (delta.follower,) if one is not None]
    counts = delta.follower is not None and delta.follower.counts
    return BackwardLaunches(
        delta=DeltaLaunch(delta.launched, at.programs_of_delta, options, counts),
        dq=Launch("_dq_kernel", "_DQ_TILES", at.programs_of_q, dq.launched, dq.kernel.operands),
        dkdv=Launch(
            "_dkdv_kernel", "_DKDV_TILES", at.programs_of_kv, dkdv.launched, dkdv.kernel.operands
        ),
        pairs=[GradientLaunch(x.name, x.launched, x.shared.programs) for x in of.pairs],
        diagonals=[GradientLaunch(x.name, x.launched, None) for x in of.diagonals],
    )
