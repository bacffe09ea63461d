"""What the kernels for Hopper read otherwise than by whole tiles of Q, K and V: pages of keys, columns of Q and K past
those of V, tiles that a block mask lists, and keys of documents."""

from __future__ import annotations

from typing import Any

from kgen.expr.mask_form import all_of, conjuncts
from kgen.expr.nodes import FIRST_AT_LEAST
from kgen.kernels.attention.plan.hopper import HopperPlan
from kgen.kernels.attention.plan.idioms import Documents
from kgen.kernels.attention.plan.model import TileLoop
from kgen.kernels.attention.targets.triton.hopper_loops import FIRST_KEY
from kgen.kernels.attention.targets.triton.kernels import KernelFields
from kgen.targets.code import (
    Assign,
    Code,
    Op,
    Statement,
    assign,
    op,
    row,
)

Fields = dict[str, Any]


NO_PAGES: Fields = {
    "there": False,
    "params": [],
    "args": [],
    "given": [],
    "k": "k",
    "v": "v",
    "rows": "BLOCK_N",
    "nbytes": "k_desc.block_type.nbytes",
}


def pages(hopper: HopperPlan, size: int) -> Fields:
    """How forward finds keys in pages of `size`, and what the launcher makes descriptors of: [pages, HKV, size, D]."""
    assert hopper.forward is not None
    return {
        "there": True,
        "size": size,
        "row": f"kv_start % {size}" if size > hopper.forward.BLOCK_N else "0",
        "params": ["block_table_ptr", "stride_tb: tl.int64", "stride_tp"],
        "args": ["block_table_ptr", "stride_tb", "stride_tp"],
        "given": ["block_table", "*block_table.stride()"],
        "k": "k.transpose(1, 2)",
        "v": "v.transpose(1, 2)",
        "rows": str(hopper.page_rows),
        "nbytes": "k_desc.block_type.nbytes"
        + f" * (BLOCK_N // {hopper.page_rows})" * (hopper.page_rows != hopper.forward.BLOCK_N),
    }


def columns(hopper: HopperPlan, there: int) -> Fields:
    """How many columns a tile has that TMA loads or stores, of the head's that are there: out may leave by halves."""
    width, halved = hopper.width, hopper.forward is not None and hopper.forward.out_in_halves
    return {
        "halved": halved,
        "half": width // 2,
        # Where they differ, a descriptor is told.
        "param": [f"n_columns={width}"] * halved,
        "of_tile": "n_columns" if halved else width,
        "of_out": [str(width // 2)] * halved,
        "D": "D" if hopper.rope else there,
        "padded": there < width,
        "guard": f"(tl.arange(0, {width}) < {there})[None, :]" if there < width else None,
    }


def from_first_key(fields: Fields, found: Documents, loop: TileLoop, kernels: KernelFields) -> Fields:
    """The causal range of documents, from its first key on and not from a multiple of a tile. A tile of queries whose
    first and last are of the same document has the mask at one end; of several documents it has it everywhere."""
    (span,) = fields["spans"]
    search = kernels.printer(loop).search(found.first, found.last)
    at, stride, size, *ends = search.args
    name = found.first.buffer.removesuffix(FIRST_AT_LEAST)
    first, last = f"{name}_of_first", f"{name}_of_last"
    known = [
        Assign((first, last), tuple(ends)),
        assign(
            "kv_lo", op(f"{FIRST_KEY}({{0}}, {{1}}, {{2}}, {{3}})", at, stride, size, first, fn=FIRST_KEY)
        ),
    ]
    begins = {"kv_lo", "kv_full_lo"}
    bounds = [b.map(_from_anywhere) for b in span["bounds"] if not begins & b.defines]
    return {
        "spans": [span | {"bounds": [*known, *bounds]}],
        "from_first_key": {"first": first, "last": last},
    }


def _from_anywhere(end: Code) -> Code:
    """An end of a range that is not a multiple of a tile."""
    match end:
        case Op(fn="mul", args=(Op(fn="over", args=(Op(fn="{0}", args=(position,)), _)), _)):
            return position
    return end


def documents(fields: Fields, found: Documents, loop: TileLoop, kernels: KernelFields) -> Fields:
    """The mask of such a range in two parts: within one document so is every key up to a query, and what compares
    documents is left out."""
    printer = kernels.printer(loop)
    rest = all_of([part for part in conjuncts(loop.program.results["mask"]) if part != found.same])
    lines, loads = list[Statement](), list[Statement]()
    for line in fields["mask_lines"]:
        if line.defines == {found.of_keys.name}:
            loads.append(line)
        else:
            lines.append(assign("mask", printer.tile(rest)) if line.defines == {"mask"} else line)
    (load,) = loads
    parts = {"several": row("gt", "n_first_masked", 0), "load": load, "same": printer.tile(found.same)}
    return {"mask_lines": lines, "documents": parts}
