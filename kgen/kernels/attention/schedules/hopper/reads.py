"""Reads of the Hopper kernels other than whole tiles of Q, K and V.

These are pages of keys, rope columns, tiles that a block mask lists, and keys of documents.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kgen.expr.mask_form import all_of, conjuncts
from kgen.expr.nodes import FIRST_AT_LEAST
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.lowered.model import LoopKernel, Param, SpanLoops
from kgen.kernels.attention.plan.idioms import Documents
from kgen.kernels.attention.plan.model import TileLoop
from kgen.kernels.attention.schedules.hopper.loops import FIRST_KEY, DocumentEnds, DocumentMask
from kgen.kernels.attention.schedules.hopper.plan import HopperPlan
from kgen.targets.code import (
    Code,
    Op,
    Statement,
    assign,
    op,
    row,
)


@dataclass(frozen=True)
class Pages:
    """The address of a tile of keys in forward. The keys may be in pages."""

    size: int | None = None
    """Keys per page; None without pages."""
    row: str = "0"
    """The first row of the tile in its page."""
    params: list[Param] = field(default_factory=list)
    k: str = "k"
    """The tensors of the TMA descriptors. Pages are [pages, HKV, size, D]."""
    v: str = "v"
    rows: str = "BLOCK_N"
    """Number of rows that TMA loads at a time."""
    nbytes: str = "args.k_desc.block_type.nbytes"
    """Bytes of a tile."""


def pages_of(plan: HopperPlan, size: int | None) -> Pages:
    """Return the place of keys in pages of `size`, if they are in pages."""
    if size is None:
        return Pages()
    assert plan.forward is not None
    parts = "" if plan.page_rows == plan.forward.BLOCK_N else f" * (BLOCK_N // {plan.page_rows})"
    return Pages(
        size=size,
        row=f"kv_start % {size}" if size > plan.forward.BLOCK_N else "0",
        params=[
            Param("block_table_ptr", "block_table"),
            Param("stride_tb", "*block_table.stride()", "tl.int64"),
            Param("stride_tp", None),
        ],
        k="k.transpose(1, 2)",
        v="v.transpose(1, 2)",
        rows=str(plan.page_rows),
        nbytes="args.k_desc.block_type.nbytes" + parts,
    )


@dataclass(frozen=True)
class Columns:
    """The number of columns of a TMA tile, and the number of columns of a head."""

    halved: bool
    """True if out is stored in halves. A descriptor then has an explicit number of columns."""
    half: int
    param: list[str]
    of_tile: str
    of_out: list[str]
    D: str
    """The columns of a tensor, in a docstring."""
    padding: str
    """Text for padded columns, in a docstring."""
    guard: str | None
    """The guard of the columns; None if the head fills the tile."""


def columns_of(plan: HopperPlan, there: int) -> Columns:
    """Return the columns of tiles for heads with `there` columns."""
    width = plan.width
    halved = plan.forward is not None and plan.forward.out_in_halves
    return Columns(
        halved=halved,
        half=width // 2,
        param=[f"n_columns={width}"] if halved else [],
        of_tile="n_columns" if halved else str(width),
        of_out=[str(width // 2)] if halved else [],
        D="D" if plan.rope else str(there),
        padding=". TMA pads columns with zeros" if there < width else "",
        guard=f"(tl.arange(0, {width}) < {there})[None, :]" if there < width else None,
    )


def from_first_key(
    kernel: LoopKernel, found: Documents, loop: TileLoop, kernels: Lowering
) -> tuple[LoopKernel, DocumentEnds]:
    """Return a causal range of documents that begins with the first key, not with a multiple of a
    tile.

    If a tile of queries is in one document, only tiles of keys at one end have the mask. Otherwise,
    all have it.
    """
    (span,) = kernel.ranges.spans
    search = kernels.printer(loop).search(found.first, found.last)
    at, stride, size, *ends = search.args
    name = found.first.buffer.removesuffix(FIRST_AT_LEAST)
    first, last = f"{name}_of_first", f"{name}_of_last"
    known = [
        *(assign(name, end) for name, end in zip((first, last), ends, strict=True)),
        assign(
            "kv_lo",
            op(f"{FIRST_KEY}({{0}}, {{1}}, {{2}}, {{3}})", at, stride, size, first, fn=FIRST_KEY),
        ),
    ]
    begins = {"kv_lo", "kv_full_lo"}
    bounds = [b.map(_from_anywhere) for b in span.bounds if not begins & b.defines]
    ranges = replace(kernel.ranges, spans=(SpanLoops([*known, *bounds], span.loops),))
    return replace(kernel, ranges=ranges), DocumentEnds(first, last)


def _from_anywhere(end: Code) -> Code:
    """Return an end of a range that need not be a multiple of a tile."""
    match end:
        case Op(fn="mul", args=(Op(fn="over", args=(Op(fn="{0}", args=(position,)), _)), _)):
            return position
    return end


def mask_of_documents(
    kernel: LoopKernel, found: Documents, loop: TileLoop, kernels: Lowering
) -> tuple[LoopKernel, DocumentMask]:
    """Return the mask of such a range in two parts, of which one compares documents.

    If a tile of queries is in one document, its range has only keys of that document. The kernel
    then skips that part.
    """
    printer = kernels.printer(loop)
    rest = all_of([part for part in conjuncts(loop.program.results["mask"]) if part != found.same])
    lines, loads = list[Statement](), list[Statement]()
    for line in kernel.body.mask_lines:
        if line.defines == {found.of_keys.name}:
            loads.append(line)
        else:
            lines.append(assign("mask", printer.tile(rest)) if line.defines == {"mask"} else line)
    (load,) = loads
    documents = DocumentMask(row("gt", "n_first_masked", 0), load, printer.tile(found.same))
    return replace(kernel, body=replace(kernel.body, mask_lines=lines)), documents
