"""The launcher of the decoding kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.attention.lowered.model import KernelParams, arguments
from kgen.kernels.attention.lowered.params import PAGES
from kgen.kernels.attention.lowered.row_max import RowResults
from kgen.kernels.attention.schedules.decode.kernels import DecodeKernels
from kgen.kernels.attention.targets.triton.exact import Exact
from kgen.kernels.attention.targets.triton.interface import Operator
from kgen.targets.code import If, Statement, assign, text
from kgen.targets.template import Template, filled

_BLOCKS = {"BLOCK_M": "block_m", "BLOCK_N": 'tile["BLOCK_N"]'}
"""The launcher's expressions for tile sizes."""

_LEAST_SPLITS = If(
    text("programs < 4 * at_once"),
    (
        assign(
            "splits",
            text("max(splits, min(most, 2))"),
            note="`splits` is an average: short sequences need fewer, so long ones get more",
        ),
    ),
    note="with more waves, long and short sequences even out",
)


@dataclass(frozen=True)
class DecodeLauncher(Operator, Exact, RowResults, KernelParams, Template):
    """The launcher of the decoding kernels."""

    template: ClassVar[str] = "attention/decode/_launcher.j2"
    optional_fields: ClassVar[tuple[str, ...]] = (
        *RowResults.optional_fields,
        *("stored_words", "part_results"),
    )

    combine_params: KernelParams
    pages: list[list[str]]
    """The arguments of the block table, if keys are in pages."""
    least_splits: list[Statement]
    """The statement that raises the number of splits if sequences differ in length."""
    batches: list[str]
    """The number of sequences, rounded up, as an argument."""
    merge_blocks: list[str]
    """The tile sizes that the merging kernel takes, as arguments."""
    width: int
    """Columns of V."""
    kv_sizes: str

    @property
    def part_results(self) -> list[str]:
        """The tensors for the results of rows in each split."""
        return [row.part for row in self.row_results]

    @property
    def stored_words(self) -> str:
        """The results, and the number of kernels without splits, for the docstring."""
        if not self.row_results:
            return "`out` and, if store_lse, base-2 `lse`. Without splits, one kernel stores both"
        rows = "".join(f", and base-2 `{x}` if not None" for x in self.row_tensors)
        return f"`out`, base-2 `lse` if store_lse{rows}. Without splits, one kernel stores all"

    def launch_functions(self) -> Iterable[str]:
        return ("_cdiv", "_launch", "_layouts", "_multiprocessors", "_next_power_of_2", "_tile")


def launcher_of(kernels: DecodeKernels, op: Operator, kv_sizes: str) -> DecodeLauncher:
    """Return the launcher of the decoding kernels."""
    decode = kernels.template
    return filled(
        DecodeLauncher,
        op,
        Exact(decode.exact),
        RowResults(decode.row_results),
        kernels.params,
        combine_params=kernels.combine_params,
        pages=[arguments(PAGES)] if decode.paged else [],
        least_splits=[_LEAST_SPLITS] if decode.balanced else [],
        batches=["BATCHES=_next_power_of_2(B)"] if decode.balanced else [],
        merge_blocks=[f"{name}={_BLOCKS[name]}" for name in decode.merge_blocks],
        width=decode.width,
        kv_sizes=kv_sizes,
    )
