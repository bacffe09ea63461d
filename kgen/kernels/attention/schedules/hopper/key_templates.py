"""Templates of the Hopper kernels whose programs own tiles of keys: dk and dv, with or without dq."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from kgen.kernels.attention.schedules.hopper.kernels import Common, DkdvKernel, Kernels
from kgen.kernels.attention.schedules.hopper.keys import KeyProducts, KeysLoop
from kgen.kernels.attention.schedules.hopper.loops import ConsumedTile
from kgen.kernels.attention.schedules.hopper.operands import KernelOperands, Warpgroup
from kgen.kernels.attention.schedules.hopper.query_templates import Dq, dq_template
from kgen.targets.code import GLUON
from kgen.targets.template import Template, filled


@dataclass(frozen=True)
class OfKeys(KeyProducts, ConsumedTile, KeysLoop, DkdvKernel, KernelOperands, Common, Template):
    """The fields of kernels whose programs own tiles of keys."""

    language: ClassVar[str] = GLUON


@dataclass(frozen=True)
class Dkdv(OfKeys):
    """The kernel of dk and dv, in which each consumer computes both for half of the keys."""

    template: ClassVar[str] = "attention/hopper/_dkdv.j2"


@dataclass(frozen=True)
class SplitDkdv(OfKeys):
    """The kernel of dk and dv, in which one consumer computes dk and the other dv."""

    template: ClassVar[str] = "attention/hopper/_dkdv_split.j2"

    dk_consumer: Warpgroup = field(kw_only=True)


@dataclass(frozen=True)
class Fused(OfKeys):
    """dq, dk and dv in one kernel."""

    template: ClassVar[str] = "attention/hopper/_backward_fused.j2"

    columns_guard: str | None = field(kw_only=True)
    """The guard of the columns of dq."""
    strides_o: str = field(kw_only=True)
    """The strides of dq, as parameters."""


@dataclass(frozen=True)
class Backward(OfKeys):
    """The backward kernels, with the producer of tiles of keys."""

    template: ClassVar[str] = "attention/hopper/_backward.j2"

    of_queries: Dq | None = field(kw_only=True)
    of_keys: Template = field(kw_only=True)


def backward_template(hopper: Kernels, dkdv: DkdvKernel) -> Backward:
    common, fused, loop = hopper.common, hopper.fused, dkdv.loop
    of_queries = None
    if hopper.dq is not None:
        assert hopper.forward is not None
        of_queries = dq_template(common, hopper.forward, hopper.dq)
    bases = (dkdv, loop.products, loop, loop.body, dkdv.operands, common)
    of_keys: Template = filled(SplitDkdv if dkdv.split else Dkdv, *bases)
    if fused is not None:
        guard, strides = fused.columns_guard, fused.strides_o
        of_keys = filled(Fused, fused.operands, *bases, columns_guard=guard, strides_o=strides)
    return filled(Backward, *bases, of_queries=of_queries, of_keys=of_keys)
