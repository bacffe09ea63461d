"""Decoding and pages from C: when a call decodes, in which tiles, and how keys in pages are given."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kgen.kernels.attention.plan.decode import MOST_QUERIES, DecodePlan
from kgen.targets.native import WORDS, Tiles, tensor
from kgen.targets.triton import tables

Fields = dict[str, Any]
NAMES = (
    *("part_ptr", "part_lse_ptr", "splits", "BATCHES", "SPLIT", "BLOCK_S"),
    *("block_table_ptr", "stride_tb", "stride_tp"),
)
"""What kernels call their arguments."""


def decode_fields(plan: DecodePlan | None, on_hopper: bool) -> Fields:
    """What templates name; `on_hopper` says whether a kernel for Hopper takes many queries."""
    if plan is None:
        return {"decode": None, "always_decodes": False, "forward_kernel": True}
    when = f"p->SQ <= {MOST_QUERIES}"
    if plan.alone:
        when = f"{when} || !forward_on_hopper(a, p)" if on_hopper else "1"
    return {
        "decode": {"when": when, "balanced": plan.balanced},
        "always_decodes": plan.alone and not on_hopper,
        "forward_kernel": not plan.alone,
    }


def decode_tables(plan: DecodePlan | None) -> list[Tiles]:
    """A row for each chip. A tile has as many rows as there are, up to what is said here: no constant of a kernel."""
    if plan is None:
        return []
    rows = tables.rows({chip: [tile] for chip, tile in plan.tiles.items()})
    return [Tiles("decode_tiles", [(chips, asdict(tile)) for chips, tile in rows], struct="decode_tile")]


def paged_inputs(size: int, head: Any, dtype: str, widest: str) -> dict[str, Fields]:
    """Keys and values in pages of `size`, and where the pages of each sequence are."""

    def pages(x: str, width: int) -> Fields:
        sizes = ["a->k.sizes[0]", str(size), "p->HKV", str(width)]
        return tensor(x, sizes, dtype, f"[pages, {size}, HKV, {width}] {WORDS[dtype]}", widest=widest)

    said = f"[B, n] int32, the pages of each sequence in order, not checked; SK is {size} n"
    table = tensor("block_table", ["p->B", "KGEN_ANY"], "int32", said)
    return {"k": pages("k", head.qk), "v": pages("v", head.v), "block_table": table}
