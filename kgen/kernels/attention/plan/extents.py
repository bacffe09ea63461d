"""What is known of lengths: which are promised, which are the same, and which rows of buffers are searched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from kgen.expr.index_ranges import IndexRanges
from kgen.expr.nodes import Node, Read, Type, Var, length_of, reads, substitute
from kgen.expr.softmax_form import KV_IDX, Q_IDX
from kgen.kernels.attention.plan.model import SIZES, SK, SQ
from kgen.kernels.attention.spec import ANY, KV_LENS, Buffer
from kgen.spec.load import Loaded
from kgen.spec.once import once_each

HEADS = IndexRanges({"b": {"B": 1, "": -1}, "h": {"HQ": 1, "": -1}}, SIZES)
"""What is known of a sequence and of a head."""
_POSITIONS: Mapping[Var, str] = {Q_IDX: "SQ", KV_IDX: "SK"}
"""How many positions there are."""


def named_extents(buffer: str, shape: Sequence[int | str]) -> tuple[int | str, ...]:
    """The extents of a buffer, those that are `any` by the name of their length."""
    return tuple(length_of(buffer, d).name if size == ANY else size for d, size in enumerate(shape))


@once_each
def without_promises(loaded: Loaded) -> Loaded:
    """The same attention for lengths of any size."""
    lengths = loaded.spec.lengths
    sides = {side: getattr(lengths, side).model_copy(update={"multiple_of": 1}) for side in ("q", "kv")}
    return replace(loaded, spec=loaded.spec.model_copy(update={"lengths": lengths.model_copy(update=sides)}))


def ties_lengths(
    trees: Iterable[Node], shapes: Mapping[str, Sequence[int | str]], aligned_to_end: bool = False
) -> bool:
    """Whether a buffer that is as long as one side is read at a position of the other, so that SQ == SK.

    With `aligned_to_end` q_idx is a position among the keys, and ties nothing.
    """
    # A read outside of a buffer is zero. With more keys than queries, the last keys would be in
    # document 0.
    tied = (("SQ", KV_IDX), *(() if aligned_to_end else (("SK", Q_IDX),)))
    return any(
        (size, index) in tied
        for tree in trees
        for read in reads(tree)
        for size, index in zip(shapes.get(read.buffer, ()), read.indices, strict=False)
    )


def is_searched(read: Read, buffer: Buffer, tied: bool) -> bool:
    """True if the elements ascend with a position, from position 0 on: the row exists, and is as long as there are
    positions, so that no position reads zero past its end. `tied`: one side is as long as the other."""
    if not buffer.sorted:
        return False
    *rows, position = read.indices
    length = buffer.shape[-1]
    ascends = length in SIZES and all(map(HEADS.within, rows, buffer.shape))
    return ascends and _ends_before(position, str(length), tied)


def _ends_before(position: Node, length: str, tied: bool) -> bool:
    """True if a position is below a length for certain."""
    same: dict[Node, Node] = {SQ: SK} if tied else {}
    own_length = Var("own_length", Type.INT)
    names: dict[Node, Node] = {Read(KV_LENS, (Var("b", Type.INT),), Type.INT): own_length, **same}
    greatest = {index.name: {"SK" if tied else size: 1, "": -1} for index, size in _POSITIONS.items()}
    ranges = IndexRanges({**HEADS.greatest, **greatest, own_length.name: {"SK": 1}}, SIZES)
    return ranges.below(substitute(position, names), substitute(Var(length, Type.INT), same))
