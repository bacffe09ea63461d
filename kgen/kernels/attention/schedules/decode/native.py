"""The C launches of the decoding kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

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
class DecodeCalls(Template):
    """The C functions for calls with few queries."""

    template: ClassVar[str] = "attention/decode/_calls.j2"

    when: str
    """The condition under which a call uses the decoding kernels."""
    balanced: bool
    width: int
    """Columns of V."""
    lse: Tensor
    row_max: bool
    """True if calls can return the largest score of each row."""


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
    own = "a->row_max.data != NULL, " if spec.row_max else ""
    width, lse = spec.head_dim.v, of.tensors.lse
    return Calls(
        functions=(DecodeCalls(when, plan.balanced, width, lse, spec.row_max),),
        late=True,
        workspace=(DecodeWorkspace(),),
        way=Way(f"launch_decode(&p, v, {own}(char *)workspace, stream)", "decodes"),
        names=(*NAMES, *(("part_max_ptr",) if spec.row_max else ())),
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
