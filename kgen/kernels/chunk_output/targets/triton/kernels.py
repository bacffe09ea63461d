"""The kernels of chunk_output in Triton: one dataclass for each of their templates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.chunk_output.plan.planning import ChunkOutputPlan
from kgen.kernels.chunk_output.spec import ChunkOutputSpec
from kgen.kernels.chunk_output.targets.triton.decay import Decay, decay
from kgen.targets.code import Code, Name, Statement, assign, op
from kgen.targets.template import Template


@dataclass(frozen=True)
class ParameterLine:
    """Parameters of a kernel that stand on a line of their own, and the arguments of its launches for them."""

    parameters: list[str]
    arguments: list[str]


# As constants, the strides of tokens and columns are offsets in load instructions. As arguments,
# each row address takes two registers.
GATES = {
    "g": ParameterLine(
        ["g_ptr", "stride_gb: tl.int64", "stride_gt: tl.constexpr", "stride_gh: tl.int64"],
        ["g", "*g.stride()"],
    ),
    "g_gamma": ParameterLine(["g_gamma_ptr", "stride_gamma: tl.constexpr"], ["g_gamma", "*g_gamma.stride()"]),
}
PACKING = ParameterLine(
    ["cu_seqlens_ptr", "chunk_indices_ptr", "N"], ["cu_seqlens", "chunk_indices", "len(cu_seqlens) - 1"]
)
SIZES = ParameterLine(
    [
        "T",
        "NT",
        "scale",
        "H: tl.constexpr",
        "HV: tl.constexpr",
        "BLOCK_K: tl.constexpr",
        "BLOCK_V: tl.constexpr",
    ],
    ["T", "NT", "scale", "H=H", "HV=HV"],
)
"""Tiles, which are the last parameters, have no argument here."""


def problem(plan: ChunkOutputPlan) -> list[ParameterLine]:
    """The parameters that all kernels have behind their tensors and strides."""
    lines = [GATES[gate] for gate in plan.gates]
    if plan.spec.varlen:
        lines.append(PACKING)
    return [*lines, SIZES]


@dataclass(frozen=True)
class RowChunk(Template):
    """The place of a chunk in a batch of sequences of one length."""

    template: ClassVar[str] = "chunk_output/triton/_row_chunk.j2"


@dataclass(frozen=True)
class PackedChunk(Template):
    """The place of a chunk among packed sequences."""

    template: ClassVar[str] = "chunk_output/triton/_packed_chunk.j2"


@dataclass(frozen=True)
class Common:
    """The parts that all kernels have alike."""

    sizes: list[str]
    """The integers that Triton compiles no versions for."""
    problem: list[list[str]]
    """The last parameters, as they stand on lines."""
    state_strides: list[str]
    state_cast: str
    """Makes a state what it is multiplied with; empty where it is that."""
    chunk: Template
    """Gives `b`, `number`, `first` and `end`: the batch, the chunk in it, its first token, the end of its tokens."""
    v_first: Code
    """The first row of the chunk in v."""


@dataclass(frozen=True)
class Kernel(Template):
    """A kernel: the product of a chunk's queries and keys (or of do and v), and a product with its state."""

    common: Common
    decay: list[Statement]
    weights: Code
    """The product, weighted by the decay; zero for pairs that do not count."""


@dataclass(frozen=True)
class Forward(Kernel):
    """The kernel of the forward pass."""

    template: ClassVar[str] = "chunk_output/triton/_forward.j2"

    decayed: Statement | None
    """Weighs the product with the state."""
    varlen: bool


@dataclass(frozen=True)
class ValueGradients(Kernel):
    """The kernel that writes dv and dh."""

    template: ClassVar[str] = "chunk_output/triton/_dvdh.j2"

    factor: Statement | None
    """The decay of each row, times `scale`."""
    dh: Code
    dv_guard: Code | None
    """The rows of dv that exist."""
    values_follow: bool
    """True if v has rows for tokens after the last sequence."""


@dataclass(frozen=True)
class KeyGradients(Kernel):
    """The kernel that writes dq, dk and dg."""

    template: ClassVar[str] = "chunk_output/triton/_dqdk.j2"

    factor: Statement | None
    """The decay of each row, times `scale`, as a column."""
    row_scale: Code
    """The factor of do in its product with a state."""
    dg: list[str]
    """The gradient of the gate, where it has one."""
    slope: Code | None
    """The factor from the gradient of an exponent to that of the gate; None for 1."""
    varlen: bool


@dataclass(frozen=True)
class Kernels:
    """The kernels of a spec."""

    forward: Forward
    dvdh: ValueGradients | None
    dqdk: KeyGradients | None


def kernels(plan: ChunkOutputPlan, helpers: set[str]) -> Kernels:
    """The kernels of a plan. The functions that their statements call are added to `helpers`."""
    spec, common = plan.spec, _common(plan)
    own, of_gradients = (decay(plan, helpers, with_slope=with_slope) for with_slope in (False, True))
    forward = _forward(spec, own, common)
    if not plan.backward:
        return Kernels(forward, None, None)
    return Kernels(forward, _dvdh(spec, own, common), _dqdk(plan, of_gradients, common))


def _common(plan: ChunkOutputPlan) -> Common:
    spec = plan.spec
    return Common(
        sizes=["N", "T", "NT"] if spec.varlen else ["T", "NT"],
        problem=[line.parameters for line in problem(plan)],
        state_strides=[f"stride_h{side}: tl.constexpr" for side in spec.state_layout],
        state_cast="" if spec.state == spec.dtype else ".to(q_ptr.dtype.element_ty)",
        chunk=PackedChunk() if spec.varlen else RowChunk(),
        v_first=op("number.to({tl}.int64) * BT") if spec.v_layout == "chunk_padded" else Name("first"),
    )


def _forward(spec: ChunkOutputSpec, decay: Decay, common: Common) -> Forward:
    power = decay.power
    return Forward(
        common,
        decay.lines,
        weights=decay.weighted("qk"),
        decayed=None if power is None else assign("out", op("out * {0}[:, None]", power)),
        varlen=spec.varlen,
    )


def _dvdh(spec: ChunkOutputSpec, decay: Decay, common: Common) -> ValueGradients:
    padded, power = spec.v_layout == "chunk_padded", decay.power
    return ValueGradients(
        common,
        decay.lines,
        weights=decay.weighted("kq", transposed=True),
        factor=None if power is None else assign("factor", op("{0} * scale", power)),
        dh=op(
            "{tl}.dot({tl}.trans(do), q) * scale"
            if power is None
            else "{tl}.dot({tl}.trans(do), (q * factor[:, None]).to(q.dtype))"
        ),
        dv_guard=None if padded else op("live[:, None]"),
        # Values that are padded to chunks have no row for a token of no chunk.
        values_follow=spec.varlen and not padded,
    )


def _dqdk(plan: ChunkOutputPlan, decay: Decay, common: Common) -> KeyGradients:
    power = decay.power
    return KeyGradients(
        common,
        decay.lines,
        weights=decay.weighted("dp"),
        factor=None if power is None else assign("factor", op("({0} * scale)[:, None]", power)),
        row_scale=Name("scale" if power is None else "factor"),
        dg=[] if plan.slope is None else ["dg"],
        slope=decay.slope,
        varlen=plan.spec.varlen,
    )
