"""The kernels for few queries, as their template prints them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.lowered.model import KernelParams, LoopKernel, TileBody, declared
from kgen.kernels.attention.lowered.params import PAGES, combine_params, decode_params
from kgen.kernels.attention.schedules.decode.lowering import DecodeKernel, decode_kernel
from kgen.kernels.attention.schedules.decode.plan import DecodePlan
from kgen.kernels.attention.targets.triton.exact import Exact
from kgen.kernels.attention.targets.triton.shared import Head, head_of, not_specialized
from kgen.targets.template import Template, filled


@dataclass(frozen=True)
class Combine(DecodeKernel, KernelParams, Template):
    """The kernel that merges the splits."""

    template: ClassVar[str] = "attention/decode/_combine.j2"

    head: Head
    exact: Exact
    width: int
    """Columns of a value."""
    no_specialize: str


@dataclass(frozen=True)
class Decode(DecodeKernel, TileBody, LoopKernel, KernelParams, Template):
    """The kernels for few queries."""

    template: ClassVar[str] = "attention/decode/_decode.j2"

    head: Head
    exact: Exact
    width: int
    """Columns of a value."""
    no_specialize: str
    combine: Combine

    @property
    def pages(self) -> list[str]:
        """The parameters of pages."""
        return declared(PAGES)


@dataclass(frozen=True)
class DecodeKernels:
    """The kernels for few queries, with the parameters of each for the launcher."""

    template: Decode
    params: KernelParams
    combine_params: KernelParams


def decode_kernels(plan: DecodePlan, lowering: Lowering) -> DecodeKernels:
    """The kernels for few queries. `lowering` is of `plan.attention`."""
    found, attention = decode_kernel(plan, lowering), plan.attention
    names = [*lowering.sizes, *lowering.open_sizes, *lowering.runtime, "splits"]
    params = decode_params(lowering, found.k_strides, found.v_strides)
    merged = combine_params(lowering, found.merge_names)
    head, exact = head_of(attention, lowering.tf32), Exact(attention.exact)
    width = attention.spec.head_dim.v
    of_merged = {"splits", *(p.name for p in merged.problem)}
    combine = filled(
        Combine,
        found,
        merged,
        head=head,
        exact=exact,
        width=width,
        no_specialize=not_specialized([name for name in names if name in of_merged]),
    )
    template = filled(
        Decode,
        found,
        found.loop.body,
        found.loop,
        params,
        head=head,
        exact=exact,
        width=width,
        no_specialize=not_specialized(names),
        combine=combine,
    )
    return DecodeKernels(template, params, merged)
