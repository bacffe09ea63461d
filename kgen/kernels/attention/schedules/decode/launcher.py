"""The launcher of the kernels for few queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.attention.lowered.model import KernelParams, arguments
from kgen.kernels.attention.lowered.params import PAGES
from kgen.kernels.attention.schedules.decode.kernels import Decode
from kgen.kernels.attention.targets.triton.exact import Exact
from kgen.kernels.attention.targets.triton.interface import Operator
from kgen.targets.template import Template


@dataclass(frozen=True)
class DecodeLauncher(Template):
    """The launcher of the kernels for few queries."""

    template: ClassVar[str] = "attention/decode/_launcher.j2"

    op: Operator
    params: KernelParams
    combine_params: KernelParams
    pages: list[str]
    balanced: bool
    exact: Exact
    width: int
    """Columns of a value."""
    kv_sizes: str


def launcher_of(kernels: Decode, op: Operator, kv_sizes: str) -> DecodeLauncher:
    """The launcher of these kernels."""
    return DecodeLauncher(
        op=op,
        params=kernels.params,
        combine_params=kernels.combine_params,
        pages=arguments(PAGES) if kernels.decode.paged else [],
        balanced=kernels.decode.balanced,
        exact=kernels.exact,
        width=kernels.width,
        kv_sizes=kv_sizes,
    )
