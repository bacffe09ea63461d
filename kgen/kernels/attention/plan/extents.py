"""Facts about lengths: promised multiples, equal lengths, and sorted rows that kernels may
search.
"""

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
"""Upper bounds of the indices of a batch and of a head."""
_POSITIONS: Mapping[Var, str] = {Q_IDX: "SQ", KV_IDX: "SK"}
"""The number of positions of each index."""


def named_extents(buffer: str, shape: Sequence[int | str]) -> tuple[int | str, ...]:
    """Return the extents of a buffer, with the name of the length instead of each `any`."""
    return tuple(length_of(buffer, d).name if size == ANY else size for d, size in enumerate(shape))


@once_each
def without_promises(loaded: Loaded) -> Loaded:
    """Return the spec without `multiple_of`, for lengths of any size."""
    lengths = loaded.spec.lengths
    sides = {
        side: getattr(lengths, side).model_copy(update={"multiple_of": 1}) for side in ("q", "kv")
    }
    return replace(
        loaded, spec=loaded.spec.model_copy(update={"lengths": lengths.model_copy(update=sides)})
    )


def ties_lengths(
    trees: Iterable[Node], shapes: Mapping[str, Sequence[int | str]], aligned_to_end: bool = False
) -> bool:
    """True if the expressions require SQ == SK.

    This is so if they read a buffer of length SQ at `kv_idx`, or one of length SK at `q_idx`. With
    `aligned_to_end`, `q_idx` is a position among the keys, so the second case does not count.
    """
    # A read outside a buffer returns zero. With more keys than queries, the last keys would be in
    # document 0.
    tied = (("SQ", KV_IDX), *(() if aligned_to_end else (("SK", Q_IDX),)))
    return any(
        (size, index) in tied
        for tree in trees
        for read in reads(tree)
        for size, index in zip(shapes.get(read.buffer, ()), read.indices, strict=False)
    )


def is_searched(read: Read, buffer: Buffer, tied: bool) -> bool:
    """True if the read elements ascend with the position, for all positions.

    The buffer must be sorted, its row must exist, and no position may read past its end. Reads
    there return zero. `tied` means SQ == SK.
    """
    if not buffer.sorted:
        return False
    *rows, position = read.indices
    length = buffer.shape[-1]
    ascends = length in SIZES and all(map(HEADS.within, rows, buffer.shape))
    return ascends and _ends_before(position, str(length), tied)


def _ends_before(position: Node, length: str, tied: bool) -> bool:
    """True if a position is provably below a length."""
    same: dict[Node, Node] = {SQ: SK} if tied else {}
    own_length = Var("own_length", Type.INT)
    names: dict[Node, Node] = {Read(KV_LENS, (Var("b", Type.INT),), Type.INT): own_length, **same}
    greatest = {
        index.name: {"SK" if tied else size: 1, "": -1} for index, size in _POSITIONS.items()
    }
    ranges = IndexRanges({**HEADS.greatest, **greatest, own_length.name: {"SK": 1}}, SIZES)
    return ranges.below(substitute(position, names), substitute(Var(length, Type.INT), same))
