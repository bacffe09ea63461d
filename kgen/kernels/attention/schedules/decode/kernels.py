"""The kernels for few queries, as their template prints them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.lowered.model import KernelParams, LoopKernel, declared
from kgen.kernels.attention.lowered.params import PAGES, combine_params, decode_params
from kgen.kernels.attention.schedules.decode.lowering import DecodeKernel, decode_kernel
from kgen.kernels.attention.schedules.decode.plan import DecodePlan
from kgen.kernels.attention.targets.triton.exact import Exact
from kgen.kernels.attention.targets.triton.shared import Head, head_of, not_specialized
from kgen.targets.template import Template


@dataclass(frozen=True)
class Decode(Template):
    """The kernels for few queries."""

    template: ClassVar[str] = "attention/decode/_decode.j2"

    decode: DecodeKernel
    params: KernelParams
    combine_params: KernelParams
    head: Head
    exact: Exact
    width: int
    """Columns of a value."""
    no_specialize: str
    combine_no_specialize: str

    @property
    def kernel(self) -> LoopKernel:
        """The loop over a share of the keys."""
        return self.decode.loop

    @property
    def pages(self) -> list[str]:
        """The parameters of pages."""
        return declared(PAGES)


def decode_kernels(plan: DecodePlan, lowering: Lowering) -> Decode:
    """The kernels for few queries. `lowering` is of `plan.attention`."""
    found, attention = decode_kernel(plan, lowering), plan.attention
    names = [*lowering.sizes, *lowering.open_sizes, *lowering.runtime, "splits"]
    merged = combine_params(lowering, found.merge_names)
    return Decode(
        decode=found,
        params=decode_params(lowering, found.k_strides, found.v_strides),
        combine_params=merged,
        head=head_of(attention, lowering.tf32),
        exact=Exact(attention.exact),
        width=attention.spec.head_dim.v,
        no_specialize=not_specialized(names),
        combine_no_specialize=not_specialized(
            [name for name in names if name == "splits" or name in {p.name for p in merged.problem}]
        ),
    )
