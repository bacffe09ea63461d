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
    """A line of parameters of a kernel, and the launch arguments for them."""

    parameters: list[str]
    arguments: list[str]


# Constant strides of tokens and columns become offsets in load instructions. As launch arguments,
# each row address would take two registers.
GATES = {
    "g": ParameterLine(
        ["g_ptr", "stride_gb: tl.int64", "stride_gt: tl.constexpr", "stride_gh: tl.int64"],
        ["g", "*g.stride()"],
    ),
    "g_gamma": ParameterLine(
        ["g_gamma_ptr", "stride_gamma: tl.constexpr"], ["g_gamma", "*g_gamma.stride()"]
    ),
}
PACKING = ParameterLine(
    ["cu_seqlens_ptr", "chunk_indices_ptr", "N"],
    ["cu_seqlens", "chunk_indices", "len(cu_seqlens) - 1"],
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
"""The last parameters are the fields of tile shapes. Their launch arguments are keywords."""


def problem(plan: ChunkOutputPlan) -> list[ParameterLine]:
    """Return the parameters that all kernels have after their tensors and strides."""
    lines = [GATES[gate] for gate in plan.gates]
    if plan.spec.varlen:
        lines.append(PACKING)
    return [*lines, SIZES]


@dataclass(frozen=True)
class RowChunk(Template):
    """Statements that find a chunk in a batch of sequences of one length."""

    template: ClassVar[str] = "chunk_output/triton/_row_chunk.j2"


@dataclass(frozen=True)
class PackedChunk(Template):
    """Statements that find a chunk in packed sequences."""

    template: ClassVar[str] = "chunk_output/triton/_packed_chunk.j2"


@dataclass(frozen=True)
class Common:
    """The parts that all kernels share."""

    sizes: list[str]
    """The integers on which Triton does not specialize."""
    problem: list[list[str]]
    """The last parameters, by lines."""
    state_strides: list[str]
    state_cast: str
    """The cast of a state to the dtype of q; empty if they are equal."""
    chunk: Template
    """Statements that set `b` (batch), `number` (chunk in it), `first` (first token) and `end` (end
    of the tokens).
    """
    v_first: Code
    """The first row of the chunk in v."""


@dataclass(frozen=True)
class Kernel(Template):
    """A kernel that multiplies the queries and keys of a chunk (or do and v), and multiplies with
    its state.
    """

    common: Common
    decay: list[Statement]
    weights: Code
    """The product, multiplied by the decay; zero for pairs that do not count."""


@dataclass(frozen=True)
class Forward(Kernel):
    """The kernel of the forward pass."""

    template: ClassVar[str] = "chunk_output/triton/_forward.j2"

    decayed: Statement | None
    """The statement that multiplies the product with the state by the decay."""
    varlen: bool


@dataclass(frozen=True)
class ValueGradients(Kernel):
    """The kernel that writes dv and dh."""

    template: ClassVar[str] = "chunk_output/triton/_dvdh.j2"

    factor: Statement | None
    """The decay of each row, times `scale`."""
    dh: Code
    dv_guard: Code | None
    """The guard of rows of dv that are in the tensor."""
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
    """The name of the gradient of the gate, if it has one."""
    slope: Code | None
    """The factor that turns the gradient of an exponent into the gradient of the gate; None
    for 1.
    """
    varlen: bool


@dataclass(frozen=True)
class Kernels:
    """The kernels of a spec."""

    forward: Forward
    dvdh: ValueGradients | None
    dqdk: KeyGradients | None


def kernels(plan: ChunkOutputPlan, helpers: set[str]) -> Kernels:
    """Return the kernels of a plan. Add the functions that their statements call to `helpers`."""
    spec, common = plan.spec, _common(plan)
    own, of_gradients = (
        decay(plan, helpers, with_slope=with_slope) for with_slope in (False, True)
    )
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
        v_first=op("number.to({tl}.int64) * BT")
        if spec.v_layout == "chunk_padded"
        else Name("first"),
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
        # If values are padded to chunks, v has no rows for tokens after the last sequence.
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
