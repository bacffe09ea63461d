"""The C++ example of attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kgen.expr.nodes import measured
from kgen.kernels.attention.plan.block_mask import BLOCK_SIZE
from kgen.kernels.attention.plan.extents import named_extents
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.spec import ANY, KV_LENS
from kgen.kernels.attention.targets.triton.native_learned import Learned, learned_example
from kgen.kernels.attention.targets.triton.native_tensors import BufferTensor, Tensors, blocks
from kgen.spec.load import Loaded
from kgen.targets.code import Code, op
from kgen.targets.native import File, Tensor, prefix_of
from kgen.targets.native_reference import Given, Sized, dtype_of, in_cpp, sized, spelled, two_of

SIZES = ("B", "HQ", "HKV", "SQ", "SK")
OPEN, INTEGER, REAL = 5, 3, 0.5
"""The values of open extents, and of run-time integer and real parameters, in the example."""
LENGTH, FEW = 200, 5
"""The length of the sequences, and the number of queries in decoding."""
BLOCKS: Mapping[Code, Code] = {
    blocks(n): op(f"({{0}} + {BLOCK_SIZE - 1}) / {BLOCK_SIZE}", n) for n in ("SQ", "SK")
}
"""Sizes of block lists. The example does not include the functions of a package."""
ERRORS = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 4e-3}
"""Maximum error relative to the largest number, by dtype: each rounding step adds up to 0.5 %."""


@dataclass(frozen=True)
class Lengths:
    """The lengths of sequences of queries and keys."""

    q: int
    kv: int


@dataclass(frozen=True)
class Drawn(Sized):
    """A buffer, and the values that fill it."""

    draw: str


@dataclass(frozen=True)
class Shapes:
    """The sizes of tensors that every spec has."""

    q: str
    k: str
    v: str
    out: str
    lse: str
    dsinks: str


@dataclass(frozen=True)
class SumOver:
    """The reduction of the gradients of sinks."""

    batches: str
    tiles: str
    at: str


@dataclass(frozen=True, kw_only=True)
class AttentionExample(File):
    """`example.cpp`: run both passes, and compare the results with a float64 reference."""

    template: ClassVar[str] = "attention/c/example.cpp.j2"

    packed: bool
    paged: bool
    sinks: bool
    backward: bool
    heads: int
    """Number of KV heads."""
    group: int
    batch: int
    lengths: Lengths
    width_qk: int
    width_v: int
    default_scale: str
    dtype: str
    lse: str
    allowed: str
    """The maximum allowed error."""
    shapes: Shapes
    sum_over: SumOver
    score_mod: str
    mask_mod: str
    """The spec's original expressions, in C++."""
    buffers: list[Drawn]
    lists: list[Sized]
    params: list[Given]
    page: int | None
    known: str
    """The number of keys of a sequence."""
    query_at: str
    """The position of a query."""
    learned: list[Learned]
    parts: list[Sized]
    """The gradient tensors that a call writes."""


def example_of(
    loaded: Loaded,
    plan: AttentionPlan,
    tensors: Tensors,
    open_sizes: Mapping[str, Sequence[int]],
    few: bool,
) -> AttentionExample:
    """Return the example of a plan, with `few` queries or many.

    Raise `KgenError` for a function that C++ does not have.
    """
    spec, buffers = plan.spec, tensors.buffers
    page = spec.paged_kv.page_size if spec.paged_kv is not None else None
    drawn = [_drawn(b, spec.buffers[b.name]) for b in buffers]
    names = _names(plan, buffers)
    with spelled(loaded):
        trees = {name: in_cpp(tree, names) for name, tree in loaded.trees.items()}
        learned, left = learned_example(
            plan, tensors.learned, names, {b.member: b.sizes for b in drawn}
        )
    # Only the first keys of a KV cache exist.
    known = "at.SK" if not spec.per_batch else f"int64_t(tensors.{_lens(buffers)}({{b}}))"
    dtypes = {t.member: t.element for t in tensors.learned}
    return AttentionExample(
        name=prefix_of(loaded),
        license=spec.license.in_comment(),
        packed=spec.varlen,
        paged=page is not None,
        sinks=bool(spec.sinks),
        backward=plan.backward,
        heads=2,
        group=two_of(open_sizes["gqa"]) if spec.gqa == "any" else int(spec.gqa),
        # Balanced decoding kernels are compiled for a number of sequences.
        batch=two_of(open_sizes["batch"]) if few else 2,
        lengths=_lengths(plan, page, few),
        width_qk=spec.head_dim.qk,
        width_v=spec.head_dim.v,
        default_scale=repr(spec.head_dim.qk**-0.5),
        dtype=dtype_of(spec.dtype),
        lse="FP64" if plan.exact else "FP32",
        allowed=repr(ERRORS[spec.dtype]),
        shapes=_shapes(plan),
        sum_over=SumOver("1", "(ends.back() + 63) / 64", "h, tile")
        if spec.varlen
        else SumOver("sizes.B", "(sizes.SQ + 63) / 64", "b, h, tile"),
        score_mod=trees.get("score_mod", "score"),
        mask_mod=trees.get("mask_mod", "true"),
        buffers=drawn,
        lists=[sized(t, "sizes.", BLOCKS) for t in tensors.lists],
        params=[Given(p.member, REAL if p.real else INTEGER) for p in tensors.params],
        page=page,
        known=known,
        query_at=f"{known} - at.SQ + i" if spec.aligned_to_end else "i",
        learned=learned,
        parts=[Sized(member, dtype_of(dtypes[member]), sizes) for member, sizes in left.items()],
    )


def _names(plan: AttentionPlan, buffers: Sequence[BufferTensor]) -> dict[str, str]:
    """Return the C++ names of values in expressions."""
    names = {n: f"at.{n}" for n in ("b", "h", "q_idx", "kv_idx", *SIZES)} | {"score": "score"}
    names["h_kv"], names["GQA"] = "(at.h / (at.HQ / at.HKV))", "(at.HQ / at.HKV)"
    for name, param in plan.spec.params.items():
        value = param.value if param.value is not None else INTEGER if param.type == "int" else REAL
        names[name] = f"INT64_C({value})" if param.type == "int" else repr(float(value))
    lengths = [s for n, b in plan.spec.buffers.items() for s in named_extents(n, b.shape)]
    names |= {s: f"INT64_C({OPEN})" for s in lengths if isinstance(s, str) and measured(s)}
    return names | {b.name: f"tensors.{b.member}" for b in buffers}


def _lengths(plan: AttentionPlan, page: int | None, few: bool) -> Lengths:
    """Return lengths that the spec allows."""
    promised = plan.spec.lengths
    queries = FEW if few else LENGTH
    return Lengths(
        _length(queries, _multiple(promised.q)), _length(LENGTH, page or _multiple(promised.kv))
    )


def _multiple(length: Any) -> int:
    return getattr(length, "multiple_of", None) or 1


def _length(most: int, multiple: int) -> int:
    return -(-most // multiple) * multiple


def _lens(buffers: Sequence[BufferTensor]) -> str:
    return next(b.member for b in buffers if b.name == KV_LENS)


def _shapes(plan: AttentionPlan) -> Shapes:
    spec, packed, n = plan.spec, plan.spec.varlen, "sizes."
    head = spec.head_dim
    rows = f"ends.back(), {n}HQ" if packed else f"{n}B, {n}HQ, {n}SQ"
    keys = f"ends.back(), {n}HKV" if packed else f"{n}B, {n}HKV, {n}SK"
    if spec.paged_kv is not None:
        size = spec.paged_kv.page_size
        keys = f"{n}B * ({n}SK / {size}), {size}, {n}HKV"
    return Shapes(
        q=f"{rows}, {head.qk}",
        k=f"{keys}, {head.qk}",
        v=f"{keys}, {head.v}",
        out=f"{rows}, {head.v}",
        lse=f"{n}HQ, ends.back()" if packed else rows,
        dsinks=f"{n}HQ, (ends.back() + 63) / 64" if packed else f"{n}B, {n}HQ, ({n}SQ + 63) / 64",
    )


def _drawn(of: Tensor, buffer: Any) -> Drawn:
    """Return a buffer with the values that fill it."""
    sizes: Mapping[str, str] = {n: f"sizes.{n}" for n in SIZES}
    shape = [str(OPEN) if s == ANY else sizes.get(str(s), str(s)) for s in buffer.shape or (1,)]
    dtype = dtype_of(buffer.dtypes[0])
    drawn = "0.5"
    if of.name == KV_LENS:
        drawn = "[](int64_t b) { return double(std::max(sizes.SK - 50 * b, sizes.SQ)); }"
    elif buffer.sorted:
        last = shape[-1]
        drawn = f"[](int64_t i) {{ return double(i % ({last}) * 3 / ({last})); }}"
    elif dtype == "BOOL":
        drawn = "[](int64_t i) { return double(i % 3 != 0); }"
    elif dtype in ("INT32", "INT64", "UINT8"):
        drawn = "[](int64_t i) { return double(i % 3); }"
    return Drawn(of.member, dtype, tuple(shape), drawn)
