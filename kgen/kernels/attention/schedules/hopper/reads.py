"""Reads of the kernels for Hopper other than whole tiles of Q, K and V: pages of keys, columns of Q and K past
those of V, tiles that a block mask lists, and keys of documents."""

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
    """How forward finds a tile of keys, which may be in pages."""

    size: int | None = None
    """Keys of a page; None where keys are in no pages."""
    row: str = "0"
    """The row of a page that a tile begins with."""
    params: list[Param] = field(default_factory=list)
    k: str = "k"
    """The tensors that the launcher makes descriptors of; pages are [pages, HKV, size, D]."""
    v: str = "v"
    rows: str = "BLOCK_N"
    """How many rows TMA loads at a time."""
    nbytes: str = "args.k_desc.block_type.nbytes"
    """Bytes of a tile."""


def pages_of(plan: HopperPlan, size: int | None) -> Pages:
    """How forward finds keys in pages of `size`, if they are in pages."""
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
    """How many columns a tile has that TMA loads or stores, and how many the head has that are there."""

    halved: bool
    """True where out leaves by halves. A descriptor is then told how many columns it has."""
    half: int
    param: list[str]
    of_tile: str
    of_out: list[str]
    D: str
    """The columns of a tensor, in a docstring."""
    padded: bool
    guard: str | None
    """Which columns are there; None where all are."""


def columns_of(plan: HopperPlan, there: int) -> Columns:
    """The columns of tiles of heads of which so many are `there`."""
    width = plan.width
    halved = plan.forward is not None and plan.forward.out_in_halves
    return Columns(
        halved=halved,
        half=width // 2,
        param=[f"n_columns={width}"] if halved else [],
        of_tile="n_columns" if halved else str(width),
        of_out=[str(width // 2)] if halved else [],
        D="D" if plan.rope else str(there),
        padded=there < width,
        guard=f"(tl.arange(0, {width}) < {there})[None, :]" if there < width else None,
    )


def from_first_key(
    kernel: LoopKernel, found: Documents, loop: TileLoop, kernels: Lowering
) -> tuple[LoopKernel, DocumentEnds]:
    """The causal range of documents, from its first key on and not from a multiple of a tile. A tile of queries whose
    first and last are of the same document has the mask at one end; of several documents it has it everywhere."""
    (span,) = kernel.ranges.spans
    search = kernels.printer(loop).search(found.first, found.last)
    at, stride, size, *ends = search.args
    name = found.first.buffer.removesuffix(FIRST_AT_LEAST)
    first, last = f"{name}_of_first", f"{name}_of_last"
    known = [
        *(assign(name, end) for name, end in zip((first, last), ends, strict=True)),
        assign(
            "kv_lo", op(f"{FIRST_KEY}({{0}}, {{1}}, {{2}}, {{3}})", at, stride, size, first, fn=FIRST_KEY)
        ),
    ]
    begins = {"kv_lo", "kv_full_lo"}
    bounds = [b.map(_from_anywhere) for b in span.bounds if not begins & b.defines]
    ranges = replace(kernel.ranges, spans=(SpanLoops([*known, *bounds], span.loops),))
    return replace(kernel, ranges=ranges), DocumentEnds(first, last)


def _from_anywhere(end: Code) -> Code:
    """An end of a range that is not a multiple of a tile."""
    match end:
        case Op(fn="mul", args=(Op(fn="over", args=(Op(fn="{0}", args=(position,)), _)), _)):
            return position
    return end


def mask_of_documents(
    kernel: LoopKernel, found: Documents, loop: TileLoop, kernels: Lowering
) -> tuple[LoopKernel, DocumentMask]:
    """The mask of such a range in two parts: within one document so is every key up to a query, and what compares
    documents is left out."""
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
