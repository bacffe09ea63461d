"""Template data of the decoding kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.lowered.model import KernelParams, LoopKernel, TileBody, declared
from kgen.kernels.attention.lowered.params import PAGES, combine_params, decode_params
from kgen.kernels.attention.lowered.row_max import RowResults, row_results_of
from kgen.kernels.attention.schedules.decode.lowering import DecodeKernel, decode_kernel
from kgen.kernels.attention.schedules.decode.plan import DecodePlan
from kgen.kernels.attention.targets.triton.exact import Exact
from kgen.kernels.attention.targets.triton.shared import Head, head_of, not_specialized
from kgen.targets.code import Run, Statement, text
from kgen.targets.template import Template, filled

_PAGES_OF_TILE = ["block_table_ptr", "stride_tp", "stride_kp", "stride_vp"]
"""The page parameters of the loop's function."""


@dataclass(frozen=True)
class Combine(DecodeKernel, Head, Exact, RowResults, KernelParams, Template):
    """The kernel that merges the splits."""

    template: ClassVar[str] = "attention/decode/_combine.j2"

    width: int
    """Columns of V."""
    no_specialize: str


@dataclass(frozen=True)
class SplitsByBatch(DecodeKernel, Template):
    """The function that assigns splits to sequences of different lengths."""

    template: ClassVar[str] = "attention/decode/_splits_by_batch.j2"


@dataclass(frozen=True)
class Decode(DecodeKernel, TileBody, LoopKernel, Head, Exact, RowResults, KernelParams, Template):
    """The kernel for one split of the keys, and the kernel that merges splits."""

    template: ClassVar[str] = "attention/decode/_decode.j2"

    width: int
    """Columns of V."""
    no_specialize: str
    splits_by_batch: SplitsByBatch | None
    combine: Combine

    @property
    def strides_and_pages(self) -> list[str]:
        """The strides of each tensor, and the page parameters."""
        return [*self.stride_params, *([", ".join(declared(PAGES))] if self.paged else [])]

    @property
    def tile_and_page_params(self) -> list[list[str]]:
        """The parameters of the loop's function for tiles, and for pages."""
        return [self.tile_params, *([_PAGES_OF_TILE] if self.paged else [])]

    @property
    def tile_and_page_args(self) -> list[list[str]]:
        """The arguments of the loop's function for tiles, and for pages."""
        return [self.tile_args, *([_PAGES_OF_TILE] if self.paged else [])]

    @property
    def page_checked(self) -> list[Statement]:
        """The check that a tile of keys is within one page, if the kernel loads it so."""
        fits = f'{self.page_size} % BLOCK_N == 0, "a tile of keys must be within one page"'
        return [Run(text(f"tl.static_assert({fits})"))] if self.paged and self.rows_known else []

    @property
    def first_keys(self) -> list[str]:
        """The statements that move pointers to the keys and values of a KV head."""
        if self.paged:
            heads = [f"{x}_ptr += h_kv * stride_{x}h" for x in "kv"]
            return [*heads, "block_table_ptr += b * stride_tb"]
        return [f"{x}_ptr += b * stride_{x}b + h_kv * stride_{x}h" for x in "kv"]


@dataclass(frozen=True)
class DecodeKernels:
    """The decoding kernels, with the parameters of each kernel for the launcher."""

    template: Decode
    params: KernelParams
    combine_params: KernelParams


def decode_kernels(plan: DecodePlan, lowering: Lowering) -> DecodeKernels:
    """Return the decoding kernels. `lowering` belongs to `plan.attention`."""
    found, attention = decode_kernel(plan, lowering), plan.attention
    names = [*lowering.sizes, *lowering.open_sizes, *lowering.runtime, "splits"]
    params = decode_params(lowering, found.k_strides, found.v_strides)
    merged = combine_params(lowering, found.merge_names)
    head, exact = head_of(attention, lowering.tf32), Exact(attention.exact)
    width, spec = attention.spec.head_dim.v, attention.spec
    of_merged = {"splits", *(p.name for p in merged.problem)}
    combine = filled(
        Combine,
        found,
        merged,
        head,
        exact,
        RowResults(row_results_of(spec, apart=True)),
        width=width,
        no_specialize=not_specialized([name for name in names if name in of_merged]),
    )
    template = filled(
        Decode,
        found,
        found.loop.body,
        found.loop,
        params,
        head,
        exact,
        RowResults(row_results_of(spec)),
        width=width,
        no_specialize=not_specialized(names),
        splits_by_batch=filled(SplitsByBatch, found) if found.balanced else None,
        combine=combine,
    )
    return DecodeKernels(template, params, merged)
