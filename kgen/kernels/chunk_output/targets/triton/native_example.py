"""The C++ example of chunk_output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kgen.expr.nodes import substitute
from kgen.kernels.chunk_output.plan.planning import ChunkOutputPlan, gate_values
from kgen.kernels.chunk_output.spec import ChunkOutputSpec
from kgen.kernels.chunk_output.targets.triton.native_tensors import ENDS, Argument, Arguments
from kgen.spec.load import Loaded
from kgen.targets.code import text
from kgen.targets.native import File, prefix_of
from kgen.targets.native_reference import Sized, in_cpp, sized, spelled, two_of

BATCH = 2
ERRORS = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 4e-3}
"""Tolerances by dtype, relative to the largest magnitude."""
VARYING = ("g", "g_gamma", "i", "h")
"""The variables of a decay, apart from the numbers of heads."""


@dataclass(frozen=True)
class Drawn:
    """A tensor with random numbers."""

    member: str
    draw: str
    """The largest magnitude, or a function that returns one."""


@dataclass(frozen=True)
class Gate:
    """A value of the decay, and its position in its tensor."""

    name: str
    at: str


@dataclass(frozen=True, kw_only=True)
class ChunkOutputExample(File):
    """`example.cpp`, which calls both passes and compares the results with a reference in
    double.
    """

    template: ClassVar[str] = "chunk_output/c/example.cpp.j2"

    K: int
    V: int
    BT: int
    B: int
    T: int
    NT: int
    H: int
    HV: int
    default_scale: str
    ends: tuple[int, ...]
    """The offsets of the sequences in a row, 0 first."""
    packed: bool
    tensors: tuple[Sized, ...]
    drawn: tuple[Drawn, ...]
    decay: str
    """The exponent of the spec, in C++."""
    gates: tuple[Gate, ...]
    log_of_base: str
    state: str
    """The position of (x, y) in a state."""
    v_rows: str
    """The number of rows of v."""
    v_of_j: str
    """The row of v of token `j` of a chunk."""
    do: str | None
    """The struct member of the gradient of o; None without backward."""
    compared: tuple[str, ...]
    """The gradients except dg."""
    has_dg: bool
    allowed: str
    """The tolerance."""


def chunk_output_example(
    loaded: Loaded,
    plan: ChunkOutputPlan,
    arguments: Arguments,
    open_sizes: Mapping[str, Sequence[int]],
) -> ChunkOutputExample:
    """Return the example of a plan.

    Raise `KgenError` if a function of the decay has no C++ spelling.
    """
    spec, gradients = plan.spec, arguments.gradients
    K, V, BT = spec.head_dim.qk, spec.head_dim.v, spec.chunk_size
    lengths = _lengths(spec)
    heads = spec.heads.qk or open_sizes["heads"][0]
    group = spec.heads.ratio or two_of(open_sizes["gqa"])
    padded = spec.v_layout == "chunk_padded"
    tensors = _tensors(arguments)
    return ChunkOutputExample(
        name=prefix_of(loaded),
        license=spec.license.in_comment(),
        K=K,
        V=V,
        BT=BT,
        B=1 if spec.varlen else BATCH,
        T=sum(lengths),
        NT=sum(-(-length // BT) for length in lengths),
        H=heads,
        HV=heads * group,
        default_scale=repr(K**-0.5),
        ends=tuple(sum(lengths[:i]) for i in range(len(lengths) + 1)),
        packed=spec.varlen,
        tensors=tuple(sized(t, "", {ENDS: text("int64_t(ends.size())")}) for t in tensors),
        drawn=_drawn(tensors, BT),
        decay=_decay(loaded, plan),
        gates=tuple(_gate(name) for name in plan.gates),
        log_of_base="1.0" if plan.natural else "std::log(2.0)",
        state="x * V + y" if spec.state_layout == "kv" else "y * K + x",
        v_rows="NT * BT" if padded else "T",
        v_of_j="chunk.number * BT + j" if padded else "chunk.first + j",
        do=gradients.do.member if gradients else None,
        compared=("dq", "dk", "dv", "dh") if gradients else (),
        has_dg=plan.slope is not None,
        allowed=repr(max(ERRORS[d] for d in (spec.dtype, spec.state, spec.gate_dtype))),
    )


def _lengths(spec: ChunkOutputSpec) -> tuple[int, ...]:
    """Return offsets of packed sequences. One sequence is empty, and others end inside a chunk."""
    BT = spec.chunk_size
    return (BT + 6, 0, 2 * BT, 5) if spec.varlen else (2 * BT + 5,)


def _decay(loaded: Loaded, plan: ChunkOutputPlan) -> str:
    if plan.decay is None:
        return "0.0"
    with spelled(loaded):
        tree = substitute(loaded.trees["decay"], gate_values())
        return in_cpp(tree, {name: f"at.{name}" for name in VARYING} | {"H": "H", "HV": "HV"})


def _tensors(arguments: Arguments) -> list[Argument]:
    """Return the tensors of a call without `chunk_indices`."""
    packing, gradients = arguments.packing, arguments.gradients
    found = [*arguments.inputs]
    if packing:
        found.append(packing.cu_seqlens)
    found.append(arguments.o)
    return [*found, *gradients.tensors] if gradients else found


def _drawn(tensors: Iterable[Argument], BT: int) -> tuple[Drawn, ...]:
    """Return random inputs. The decay changes inside a chunk."""
    draws = dict.fromkeys(("q", "k", "v", "h", "do"), "1.0")
    for name, most in (("g", -1.0), ("g_gamma", -1.0 / BT)):
        draws[name] = f"[](int64_t) {{ return {most} * std::fabs(example::random_number()); }}"
    members = {t.name: t.member for t in tensors}
    return tuple(Drawn(members[name], draw) for name, draw in draws.items() if name in members)


def _gate(name: str) -> Gate:
    at = {"g": "place_of_row(chunk.b, T, chunk.first + i, HV, h)", "g_gamma": "size_t(h)"}
    return Gate(name, at[name])
