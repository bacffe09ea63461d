"""The launcher of chunk_output in Triton, from argument checks to gradients: a dataclass for each
template.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.chunk_output.plan.planning import ChunkOutputPlan
from kgen.kernels.chunk_output.spec import ChunkOutputSpec
from kgen.kernels.chunk_output.targets.interface import casts, inputs, packing, signature
from kgen.kernels.chunk_output.targets.triton.kernels import problem
from kgen.targets import opening
from kgen.targets.arguments import (
    NO_DERIVATIVE,
    NOT_ASKED_FOR,
    Derivatives,
    dense,
    derivatives_of,
)
from kgen.targets.launching import LaunchFunctions
from kgen.targets.template import Template
from kgen.targets.triton.text import TORCH_DTYPES


@dataclass(frozen=True)
class Shapes:
    """The shapes of values and states, in words."""

    v: str
    h: str


@dataclass(frozen=True)
class Docstring(Template):
    """The part of the function's docstring on arguments and results."""

    template: ClassVar[str] = "chunk_output/triton/_docstring.j2"

    K: int
    V: int
    BT: int
    dtype: str
    state_dtype: str
    head_words: str
    shapes: Shapes
    v_words: list[str]
    gate_words: list[str]
    varlen: bool
    grad_words: str | None
    derivatives: Derivatives


@dataclass(frozen=True)
class Operands:
    """The operands of the operator."""

    tensors: list[str]
    """The names of the tensors; the last operand is `scale`."""
    parameters: list[str]
    """All operands with their types."""
    problem: list[str]
    """The launch arguments of all kernels after tensors and strides."""


@dataclass(frozen=True)
class Check:
    """The condition of an error, and its message."""

    wrong: str
    message: str


@dataclass(frozen=True)
class Gradients(Template):
    """The operator of the backward pass."""

    template: ClassVar[str] = "chunk_output/triton/_gradients.j2"

    name: str
    K: int
    V: int
    bf16: bool
    varlen: bool
    operands: Operands
    derived: list[str]
    """The inputs that have gradients."""
    dg: list[str]
    """The name of the gradient of the gate, if it has one."""
    returned: list[str]
    """The gradient of each operand, or None."""
    new_like: str
    """The call that allocates the gradient of `x`."""
    new_dg: str
    """The call that allocates the partial sums of dg."""

    def launch_functions(self) -> Iterable[str]:
        return ("_once", "_operator", "_register_autograd", "_tile")


@dataclass(frozen=True)
class Launcher(Template):
    """Tile lookup, operators, and the spec's function."""

    template: ClassVar[str] = "chunk_output/triton/_launcher.j2"

    name: str
    launching: LaunchFunctions | None
    """The functions of all launchers, if the file contains their text."""
    summary: str
    docstring: Docstring
    signature: str
    K: int
    V: int
    dtype: str
    state_dtype: str
    bf16: bool
    varlen: bool
    operands: Operands
    new_o: str
    """The call that allocates the output."""
    gradients: Gradients | None
    derivatives: Derivatives
    dense_check: str
    casts: list[str]
    gate_checks: list[str]
    """For each gate, a Python tuple of label, tensor, number of dimensions and dtype."""
    checks: list[Check]

    def launch_functions(self) -> Iterable[str]:
        names = ["_arch_for", "_cast", "_dense", "_library", "_operator", "_real", "_tile"]
        if self.varlen:
            names.append("_dtype")
        return (*names, *self.derivatives.launch_functions())


def launcher(plan: ChunkOutputPlan, launching: LaunchFunctions | None) -> Launcher:
    """Return the launcher of a plan."""
    spec = plan.spec
    gate = TORCH_DTYPES[spec.gate_dtype]
    said, derivatives, operands = docstring(plan), _derivatives(plan), _operands(plan)
    return Launcher(
        name=spec.name,
        launching=launching,
        summary=opening(spec),
        docstring=said,
        signature=str(signature(plan)),
        K=said.K,
        V=said.V,
        dtype=said.dtype,
        state_dtype=said.state_dtype,
        bf16=spec.dtype == "bf16",
        varlen=spec.varlen,
        operands=operands,
        new_o=f"_new(q, NT, (B, T, HV, {said.V}))"
        if spec.varlen
        else f"q.new_empty(B, T, HV, {said.V})",
        gradients=_gradients(plan, operands) if plan.backward else None,
        derivatives=derivatives,
        dense_check=dense(spec.name, operands.tensors),
        casts=casts(plan),
        gate_checks=[f'("{g}", {g}, {3 if g == "g" else 1}, torch.{gate})' for g in plan.gates],
        checks=_checks(plan),
    )


def docstring(plan: ChunkOutputPlan) -> Docstring:
    """Return the part of the function's docstring on arguments and results."""
    spec = plan.spec
    gate = TORCH_DTYPES[spec.gate_dtype]
    words = {
        "g": f"g: [B, T, HV] {gate}, summed up inside each chunk.",
        "g_gamma": f"g_gamma: [HV] {gate}.",
    }
    padding = ["padded to whole chunks; what is in the padding does not matter"]
    learned = "q, k, v, h and g" if plan.slope is not None else "q, k, v, h"
    return Docstring(
        K=spec.head_dim.qk,
        V=spec.head_dim.v,
        BT=spec.chunk_size,
        dtype=TORCH_DTYPES[spec.dtype],
        state_dtype=TORCH_DTYPES[spec.state],
        head_words=head_words(spec),
        shapes=shapes(spec),
        v_words=padding if spec.v_layout == "chunk_padded" else [],
        gate_words=[words[g] for g in plan.gates],
        varlen=spec.varlen,
        grad_words=f"Differentiable in {learned}." if plan.backward else None,
        derivatives=_derivatives(plan),
    )


def shapes(spec: ChunkOutputSpec) -> Shapes:
    """Return the shapes of values and states."""
    length = f"NT * {spec.chunk_size}" if spec.v_layout == "chunk_padded" else "T"
    state = "K, V" if spec.state_layout == "kv" else "V, K"
    return Shapes(v=f"[B, {length}, HV, V]", h=f"[B, NT, HV, {state}]")


def head_words(spec: ChunkOutputSpec) -> str:
    """Describe the numbers of heads."""
    heads = spec.heads
    if heads.qk:
        return f"H is {heads.qk}, HV {heads.v}"
    return f"HV is {heads.group} * H" if heads.group else "HV is a multiple of H"


def _operands(plan: ChunkOutputPlan) -> Operands:
    tensors = [*inputs(plan), *packing(plan.spec)]
    return Operands(
        tensors,
        [*(f"{t}: {_type(t)}" for t in tensors), "scale: float"],
        [argument for line in problem(plan) for argument in line.arguments],
    )


def _type(tensor: str) -> str:
    return "Optional[Tensor]" if tensor == "chunk_indices" else "Tensor"


def _gradients(plan: ChunkOutputPlan, operands: Operands) -> Gradients:
    spec, tensors = plan.spec, operands.tensors
    derived = _derived(plan)
    packed = ("_new(x, NT, x.shape)", "_new(q, NT, (blocks, B, T, HV), torch.float32)")
    in_rows = ("x.new_empty(x.shape)", "q.new_empty(blocks, B, T, HV, dtype=torch.float32)")
    new_like, new_dg = packed if spec.varlen else in_rows
    return Gradients(
        name=spec.name,
        K=spec.head_dim.qk,
        V=spec.head_dim.v,
        bf16=spec.dtype == "bf16",
        varlen=spec.varlen,
        operands=operands,
        derived=derived,
        dg=[] if plan.slope is None else ["dg"],
        returned=[*(f"d{t}" if t in derived else "None" for t in tensors), "None"],
        new_like=new_like,
        new_dg=new_dg,
    )


def _derived(plan: ChunkOutputPlan) -> list[str]:
    """Return the inputs that have gradients, in order."""
    return ["q", "k", "v", "h"] if plan.slope is None else ["q", "k", "v", "h", "g"]


def _derivatives(plan: ChunkOutputPlan) -> Derivatives:
    real = inputs(plan)
    if plan.backward:
        refused = {n: NO_DERIVATIVE for n in real if n not in _derived(plan)}
    else:
        refused = dict.fromkeys(real, NOT_ASKED_FOR)
    return derivatives_of(real, refused, derived=plan.backward)


def _checks(plan: ChunkOutputPlan) -> list[Check]:
    """Yield the checks of numbers of heads, shapes and strides."""
    return [_heads(plan.spec), *_shapes(plan), *_strides(plan), _chunks(plan.spec)]


def heads_rule(group: int) -> str:
    """Return the condition on the numbers of heads, for messages."""
    return f"v must have {f'{group} heads for each head of' if group > 1 else 'as many heads as'} q"


def _heads(spec: ChunkOutputSpec) -> Check:
    heads = spec.heads
    if heads.qk:
        return Check(
            f"(H, HV) != ({heads.qk}, {heads.v})",
            f"q must have {heads.qk} heads and v {heads.v}, got {{H}} and {{HV}}",
        )
    if heads.group:
        return Check(
            f"HV != {heads.group} * H",
            f"{heads_rule(heads.group)}, got {{HV}} and {{H}}",
        )
    return Check(
        "H == 0 or HV % H",
        "the number of heads of v must be a multiple of that of q, got {HV} and {H}",
    )


def _shapes(plan: ChunkOutputPlan) -> list[Check]:
    spec = plan.spec
    k, v = spec.head_dim.qk, spec.head_dim.v
    length = f"NT * {spec.chunk_size}" if spec.v_layout == "chunk_padded" else "T"
    state = f"{k}, {v}" if spec.state_layout == "kv" else f"{v}, {k}"
    wanted = {"q": f"(B, T, H, {k})", "k": f"(B, T, H, {k})", "v": f"(B, {length}, HV, {v})"}
    wanted |= {"h": f"(B, NT, HV, {state})", "g": "(B, T, HV)", "g_gamma": "(HV,)"}
    return [
        Check(
            f"{name}.shape != {wanted[name]}",
            f"{name} must be {{list({wanted[name]})}}, got {{list({name}.shape)}}",
        )
        for name in inputs(plan)
    ]


def _strides(plan: ChunkOutputPlan) -> list[Check]:
    """Return the checks that strides are small: kernels multiply positions by strides in 32
    bits.
    """
    tokens = ["q", "k", "v"]
    elements = ["*(x.stride(3) for x in (q, k, v, h))", "h.stride(4)"]
    if "g" in plan.gates:
        tokens.append("g")
    if "g_gamma" in plan.gates:
        elements.append("g_gamma.stride(0)")
    return [
        Check(
            f"max(x.stride(1) for x in ({', '.join(tokens)})) >= 2**24",
            "strides between tokens must be less than 2**24: make the tensors contiguous",
        ),
        Check(
            f"max({', '.join(elements)}) >= 2**23",
            (
                "strides between elements of a row must be less than 2**23: make the tensors "
                "contiguous"
            ),
        ),
    ]


def _chunks(spec: ChunkOutputSpec) -> Check:
    BT = spec.chunk_size
    if spec.varlen:
        return Check("B != 1", "packed sequences need B = 1, got {B}")
    return Check(
        f"NT != -(-T // {BT})",
        f"h must have a state for each of {{-(-T // {BT})}} chunks, got {{NT}}",
    )
