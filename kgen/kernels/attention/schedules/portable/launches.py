"""Launches of the portable kernels in the launcher."""

from __future__ import annotations

from kgen.expr.spelling import MUL
from kgen.kernels.attention.lowered.model import KernelParams, LoopKernel
from kgen.kernels.attention.schedules.portable.kernels import (
    BackwardKernels,
    Diagonal,
    Pair,
    PortableKernels,
)
from kgen.kernels.attention.targets.triton.exact import Exact
from kgen.kernels.attention.targets.triton.launches import (
    BackwardLaunches,
    DeltaLaunch,
    GradientLaunch,
    Launch,
    Launches,
)
from kgen.kernels.attention.targets.triton.placement import Placement
from kgen.targets.code import op
from kgen.targets.template import filled


def launches_of(kernels: PortableKernels, at: Placement) -> Launches:
    """Return the launches of the portable kernels."""
    of = kernels.forward
    forward = _launch("forward", at.programs_of_q, of.launched, of.kernel)
    backward = _backward(kernels.backward, at) if kernels.backward is not None else None
    return Launches(forward if kernels.many_queries else None, backward)


def _backward(of: BackwardKernels, at: Placement) -> BackwardLaunches:
    delta, dq, dkdv = of.delta, of.dq, of.dkdv
    return BackwardLaunches(
        delta=filled(
            DeltaLaunch,
            delta.launched,
            Exact(delta.exact),
            programs=at.programs_of_delta,
            options=[f"START_NEXT={one.when}" for one in (delta.follower,) if one is not None],
        ),
        counts=delta.follower is not None and delta.follower.counts,
        dq=_launch("dq", at.programs_of_q, dq.launched, dq.kernel),
        dkdv=_launch("dkdv", at.programs_of_kv, dkdv.launched, dkdv.kernel),
        of_buffers=[*map(_of_pair, of.pairs), *map(_of_diagonal, of.diagonals)],
    )


def _launch(name: str, programs: str, params: KernelParams, kernel: LoopKernel) -> Launch:
    return filled(
        Launch,
        params,
        kernel=f"_{name}_kernel",
        tiles=f"_{name.upper()}_TILES",
        programs=programs,
        operands=kernel.operands,
    )


def _of_pair(kernel: Pair) -> GradientLaunch:
    programs = op('_cdiv(SQ, tile["BLOCK_M"]) * _cdiv(SK, tile["BLOCK_N"])', binds=MUL)
    if kernel.shared.programs is not None:
        programs = op("{0} * {1}", programs, kernel.shared.programs, binds=MUL, operand=MUL)
    return filled(
        GradientLaunch,
        kernel.launched,
        kernel=f"_{kernel.name}_kernel",
        tiles="_PAIR_TILES",
        programs=programs,
        needed="programs",
    )


def _of_diagonal(kernel: Diagonal) -> GradientLaunch:
    return filled(
        GradientLaunch,
        kernel.launched,
        kernel=f"_{kernel.name}_kernel",
        tiles="_DIAGONAL_TILES",
        programs=op('(_cdiv(SQ, tile["BLOCK"]) + _cdiv(SK, tile["BLOCK"]) - 1) * B * HQ'),
        needed="programs and SQ and SK",
    )
