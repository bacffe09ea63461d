"""The parameters of each kernel of attention."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from kgen.kernels.attention.lowered.lowering import Lowering, row_strides
from kgen.kernels.attention.lowered.model import KernelParams, LoopKernel, Param, declared
from kgen.kernels.attention.lowered.recomputed import PairKernel, Recomputed
from kgen.kernels.attention.lowered.row_max import row_results_of

_QUERIES_AND_KEYS = ("q", "k", "v")
_DQ = {"dq": "dq"}
SINKS = (Param("sinks_ptr", "sinks"), Param("stride_sinks", "*sinks.stride()"))
PAGES = (
    Param("block_table_ptr", "block_table"),
    Param("stride_tb", "*block_table.stride()", "tl.int64"),
    Param("stride_tp", None),
)
"""The parameters of a paged KV cache."""


def forward_params(lowering: Lowering, kernel: LoopKernel) -> KernelParams:
    """Return the parameters of the forward kernel."""
    tensors = [
        *_pointers(*_QUERIES_AND_KEYS),
        *_descriptors(kernel),
        Param("o_ptr", "out"),
        *_pointers("lse"),
        *row_max_of(lowering),
    ]
    tensors += SINKS if lowering.spec.sinks else ()
    return _params(lowering, [*tensors, *kernel.ranges.lists], {"o": "out"})


def dq_params(lowering: Lowering, kernel: LoopKernel) -> KernelParams:
    """Return the parameters of the kernel of dq."""
    return _params(lowering, _of_backward(kernel, "dq"), {"do": "dout"} | _DQ)


def strides_of_dq(lowering: Lowering) -> str:
    """Return the signature of the strides of dq."""
    [strides] = _strides(lowering, _DQ)
    return ", ".join(declared(strides))


def dkdv_params(lowering: Lowering, kernel: LoopKernel) -> KernelParams:
    """Return the parameters of the kernel of dk and dv."""
    return _params(
        lowering, _of_backward(kernel, "dk", "dv"), {"do": "dout", "dk": "dk", "dv": "dv"}
    )


def delta_params(lowering: Lowering, more: Sequence[Param]) -> KernelParams:
    """Return the parameters of the kernel of delta, with `more` after its tensors."""
    tensors = [Param("o_ptr", "out"), Param("do_ptr", "dout"), *_pointers("dlse", "delta"), *more]
    if lowering.spec.sinks:
        tensors += [*_pointers("lse"), *SINKS, *_pointers("d_sinks")]
    order = "hs" if lowering.packed else "bhs"
    first, *rest = row_strides("l", order, "dlse")
    of_dlse = (replace(first, argument="*dlse_strides"), *rest)
    names = ("B", "TQ") if lowering.packed else ("HQ", "SQ")
    ends = _pointers("cu_seqlens_q") if lowering.packed else []
    return KernelParams(
        tuple(tensors),
        (*_strides(lowering, {"o": "out", "do": "dout"}), of_dlse),
        (*ends, *(Param(name, name) for name in names)),
    )


def pair_params(lowering: Lowering, kernel: PairKernel) -> KernelParams:
    """Return the parameters of a kernel for a gradient with an element for each pair."""
    found = diagonal_params(lowering, kernel.tile)
    return replace(found, strides=(*found.strides, tuple(kernel.gradient_strides)))


def diagonal_params(lowering: Lowering, tile: Recomputed) -> KernelParams:
    """Return the parameters of a kernel for a gradient with an element for each distance."""
    tensors = [
        *_pointers(*_QUERIES_AND_KEYS),
        Param("do_ptr", "dout"),
        *_pointers("lse", "delta", tile.name),
    ]
    return _params(lowering, tensors, {"do": "dout"})


def decode_params(
    lowering: Lowering, k_strides: Sequence[Param], v_strides: Sequence[Param]
) -> KernelParams:
    """Return the parameters of the decoding kernel for one split, without page parameters."""
    tensors = [
        *_pointers(*_QUERIES_AND_KEYS),
        Param("o_ptr", "out"),
        *_pointers("lse"),
        *row_max_of(lowering),
        *_pointers("part", "part_lse"),
        *_part_max_of(lowering),
    ]
    found = _params(lowering, tensors, {"o": "out"})
    of_q, *_, of_out = found.strides
    return replace(found, strides=(of_q, tuple(k_strides), tuple(v_strides), of_out))


def combine_params(lowering: Lowering, used: Collection[str]) -> KernelParams:
    """Return the parameters of the kernel that merges splits. Omit sizes that are not `used`."""
    parts = [*_pointers("part", "part_lse"), *_part_max_of(lowering)]
    tensors = [*parts, Param("o_ptr", "out"), *_pointers("lse"), *row_max_of(lowering)]
    problem = [
        p for of in _by_argument(_problem(lowering)) if any(p.name in used for p in of) for p in of
    ]
    return KernelParams(tuple(tensors), _strides(lowering, {"o": "out"}), tuple(problem))


def row_max_of(lowering: Lowering) -> list[Param]:
    """Return the parameter for the largest score of each row, if calls can return it."""
    return [row.param for row in row_results_of(lowering.spec)]


def _part_max_of(lowering: Lowering) -> list[Param]:
    """Return the parameter for the largest score of each row in each split."""
    return _pointers(*(row.part for row in row_results_of(lowering.spec)))


def _by_argument(params: Iterable[Param]) -> list[list[Param]]:
    """Group parameters that one launch argument fills."""
    groups: list[list[Param]] = []
    for param in params:
        if param.argument is None:
            groups[-1].append(param)
        else:
            groups.append([param])
    return groups


def _params(lowering: Lowering, tensors: Sequence[Param], more: dict[str, str]) -> KernelParams:
    """Return the parameters of a kernel with Q, K and V.

    `more` are other tensors of rows by their name in kernels.
    """
    names = {x: x for x in _QUERIES_AND_KEYS}
    return KernelParams(tuple(tensors), _strides(lowering, names | more), _problem(lowering))


def _of_backward(kernel: LoopKernel, *written: str) -> list[Param]:
    assert kernel.gradients is not None
    read = [*_pointers(*_QUERIES_AND_KEYS), Param("do_ptr", "dout"), *_descriptors(kernel)]
    return [
        *read,
        *_pointers("lse", "delta", *written),
        *kernel.ranges.lists,
        *kernel.gradients.gradient_params,
    ]


def _pointers(*tensors: str) -> list[Param]:
    return [Param(f"{name}_ptr", name) for name in tensors]


def _descriptors(kernel: LoopKernel) -> list[Param]:
    first, *others = kernel.operands.descs
    return [Param(first, "*descs"), *(Param(name, None) for name in others)]


def _strides(lowering: Lowering, tensors: dict[str, str]) -> tuple[tuple[Param, ...], ...]:
    """Return the strides of tensors of rows, by their name in kernels."""
    order = "shd" if lowering.packed else "bhsd"
    return tuple(tuple(row_strides(name, order, tensor)) for name, tensor in tensors.items())


def _problem(lowering: Lowering) -> tuple[Param, ...]:
    return tuple(lowering.problem.values())
