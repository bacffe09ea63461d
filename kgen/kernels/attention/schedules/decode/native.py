"""The C launches of the decoding kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

from kgen.kernels.attention.lowered.row_max import RowResults, row_results_of
from kgen.kernels.attention.schedules.decode.plan import (
    MOST_QUERIES,
    DecodePlan,
    decodes,
    plan_decode,
)
from kgen.kernels.attention.targets.triton.native_calls import Calls, Prepared, Way
from kgen.targets.native import Tensor, Tiles
from kgen.targets.template import Template
from kgen.targets.triton import tables

NAMES = (
    *("part_ptr", "part_lse_ptr", "splits", "BATCHES", "SPLIT", "BLOCK_S"),
    *("block_table_ptr", "stride_tb", "stride_tp"),
)
"""The names of kernel arguments."""


@dataclass(frozen=True)
class DecodeCalls(RowResults, Template):
    """The C functions for calls with few queries."""

    template: ClassVar[str] = "attention/decode/_calls.j2"

    when: str
    """The condition under which a call uses the decoding kernels."""
    balanced: bool
    width: int
    """Columns of V."""
    lse: Tensor

    @property
    def part_results(self) -> list[str]:
        """The parts of the results of rows in the workspace."""
        return [row.part for row in self.row_results]

    @property
    def stores(self) -> list[str]:
        """The variables that are true if the kernels store these results."""
        return [f"stores_{row.name}" for row in self.row_results]


@dataclass(frozen=True)
class DecodeWorkspace(Template):
    """The statements that compute the workspace size of a call with few queries."""

    template: ClassVar[str] = "attention/decode/_workspace.j2"


def calls(of: Prepared, others: Sequence[Calls]) -> Calls:
    """Return the C launches of the decoding kernels, if the spec has them."""
    if not decodes(of.loaded):
        return Calls()
    plan = plan_decode(of.loaded)
    when = f"p->SQ <= {MOST_QUERIES}"
    if plan.alone:
        rest = [f"!{one.way.serves}(a, p)" for one in others if one.way is not None]
        when = " || ".join([when, *rest]) if rest else "1"
    spec = of.plan.spec
    results = row_results_of(spec)
    own = "".join(f"a->{row.tensor}.data != NULL, " for row in results)
    width, lse = spec.head_dim.v, of.tensors.lse
    return Calls(
        functions=(DecodeCalls(results, when, plan.balanced, width, lse),),
        late=True,
        workspace=(DecodeWorkspace(),),
        way=Way(f"launch_decode(&p, v, {own}(char *)workspace, stream)", "decodes"),
        names=(*NAMES, *(f"{row.part}_ptr" for row in results)),
        tiles=tuple(_tables(plan)),
        decodes=True,
    )


def _tables(plan: DecodePlan) -> list[Tiles]:
    """Return the tile tables, with one row per chip. `BLOCK_M` is a maximum, not a kernel
    constant.
    """
    rows = tables.rows({chip: [tile] for chip, tile in plan.tiles.items()})
    return [
        Tiles("decode_tiles", [(chips, asdict(tile)) for chips, tile in rows], struct="decode_tile")
    ]
