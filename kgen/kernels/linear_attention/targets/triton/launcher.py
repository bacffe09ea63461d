"""The launcher of linear attention in Triton, from argument checks to gradients: a dataclass for
each template.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.linear_attention.plan.planning import LinearAttentionPlan
from kgen.kernels.linear_attention.schedules import keeps, schedule_of
from kgen.kernels.linear_attention.targets.triton.gradients import BackwardKernels
from kgen.kernels.linear_attention.targets.triton.interface import (
    STEPPED,
    Function,
    FunctionOfChunks,
    Interface,
    KeepingFunction,
)
from kgen.kernels.linear_attention.targets.triton.kernels import Kernels
from kgen.kernels.linear_attention.targets.triton.made import InFile, OfBackward
from kgen.kernels.linear_attention.targets.triton.steps import Step, Steps
from kgen.targets import opening
from kgen.targets.launching import LaunchFunctions
from kgen.targets.template import Template
from kgen.targets.triton.text import TORCH_DTYPES


@dataclass(frozen=True)
class Decoding(Template):
    """The operator that steps a state in place."""

    template: ClassVar[str] = "linear_attention/triton/_decode_op.j2"
    optional_fields: ClassVar[tuple[str, ...]] = ("finish",)

    name: str
    bf16: bool
    parameters: list[str]
    operands: list[str]
    varlen: bool
    layouts: str
    step: Step
    finish: Step | None
    function: Function

    def launch_functions(self) -> Iterable[str]:
        rows = [] if self.finish is None else ["_cdiv"]
        return ("_launch", "_layouts", "_tile", *rows)


@dataclass(frozen=True)
class Backward(Template):
    """The operator of the backward pass."""

    template: ClassVar[str] = "linear_attention/triton/_backward.j2"
    optional_fields: ClassVar[tuple[str, ...]] = ("first", "keeps", "of_chip")

    name: str
    bf16: bool
    varlen: bool
    parameters: list[str]
    operands: list[str]
    results: str
    layouts: str
    state_shape: str
    state_dtype: str
    in_float32: list[str]
    """Statements that cast the operands for a call in float32."""
    recomputed: list[str]
    """The tensors of forward that backward computes again."""
    of_chunks: list[str]
    """The operands of this computation."""
    mapped: list[str]
    first: list[Step]
    """The launches after which `do` is the gradient of the output before gate and norm."""
    steps: list[Step]
    sums: list[str]
    """Statements that add parts of gradients."""
    gradients: list[str]
    """The buffers with gradients."""
    likes: list[str]
    """The inputs with gradients, apart from the initial state."""
    inputs: list[str]
    """The operands of forward."""
    saved: list[str]
    kept: list[str]
    """The tensors that autograd keeps."""
    returned: list[str]
    """The gradient of each operand of forward, or None."""
    keeps: bool
    """True if forward keeps tensors only on request."""
    chosen: str
    """The function that decides between the kernels of a chip and portable ones."""
    of_chip: str
    """The function that launches the kernels of the chip, or empty."""

    def launch_functions(self) -> Iterable[str]:
        more = [*(["_cdiv"] if self.first else []), *(["_by_tma"] if self.of_chip else [])]
        return ("_launch", "_layouts", "_once", "_operator", "_register_autograd", "_tile", *more)


@dataclass(frozen=True)
class Launcher(Template):
    """Tile lookup, operators, and the spec's functions."""

    template: ClassVar[str] = "linear_attention/triton/_launcher.j2"
    optional_fields: ClassVar[tuple[str, ...]] = ("finish", "choice", "keep")

    name: str
    launching: LaunchFunctions | None
    """The functions of all launchers, if the file contains their text."""
    BT: int
    bf16: bool
    varlen: bool
    parameters: list[str]
    """The operands of the operator with their types."""
    operands: list[str]
    results: str
    """The type of the operator."""
    layouts: str
    """The tensors whose layout decides which machine code a launch needs."""
    chunks: list[Step]
    held: list[str]
    saved: list[str]
    """The results of forward that backward reads."""
    mapped: list[str]
    """Statements that replace q and k by the results of their feature maps."""
    in_bf16: list[str]
    """The results of a call in float32, cast to the dtypes of the operator."""
    output: Step
    finish: Step | None
    state_shape: str
    state_dtype: str
    ends: str
    """The call that allocates the states after chunks."""
    fakes: list[str]
    """Calls that allocate the results."""
    fakes_of_saved: list[str]
    backward: Backward | None
    function: Function
    decoding: Decoding | None
    choice: Template | None
    """The function that decides between the kernels of a chip and portable ones."""
    chosen: str
    """Its name."""
    of_chip: str
    """The function that launches the kernels of the chip."""
    keep: str
    """The flag by which forward keeps tensors for backward, after other arguments, or empty."""

    def launch_functions(self) -> Iterable[str]:
        return ("_arch_for", "_cdiv", "_launch", "_layouts", "_library", "_operator", "_tile")


def launcher(
    interface: Interface,
    kernels: Kernels,
    backward: BackwardKernels | None,
    launching: LaunchFunctions | None,
    own: InFile | None,
) -> Launcher:
    """Return the launcher of a plan. `own` are the parts of the kernels for one chip."""
    plan, spec, steps = interface.plan, interface.spec, Steps(interface.plan)
    held, operands, saved = steps.held(kernels), _operands(interface), saved_of(plan, kernels)
    typed = [f"{n}: {_TYPES.get(n, 'Tensor')}" for n in operands_of(interface)]
    schedule = schedule_of(plan)
    return Launcher(
        name=spec.name,
        launching=launching,
        BT=spec.chunk_size,
        bf16=spec.dtype == "bf16",
        varlen=spec.varlen,
        parameters=typed,
        operands=operands,
        results=f"tuple[{', '.join(['Tensor'] * (3 + len(saved)))}]",
        layouts=", ".join([*interface.tensors, "initial_state", *interface.packing]),
        chunks=list(steps.chunks(kernels)),
        held=held,
        saved=saved,
        mapped=[f"{n[0]} = {n}" for n in ("q_mapped", "k_mapped") if n in held],
        in_bf16=["o.bfloat16()", "final_state", "ends", *(_in_bf16(name) for name in saved)],
        output=steps.output(kernels),
        finish=steps.finish(kernels),
        state_shape=f"(N, HV, {interface.K}, {interface.V})",
        state_dtype=TORCH_DTYPES[spec.state_dtype],
        ends=steps.made()["ends"].call("states"),
        fakes=["v.new_empty(v.shape)", "final_state", "ends", *(_fake(steps, n) for n in saved)],
        fakes_of_saved=[_fake(steps, n) for n in saved],
        backward=_backward(interface, kernels, backward, own) if backward else None,
        function=_function(interface),
        decoding=_decoding(interface, kernels, steps) if kernels.decode else None,
        choice=own.choice if own is not None else None,
        chosen=schedule.chip.choice if schedule is not None else "",
        of_chip=own.function if own is not None else "",
        keep=", keep" if keeps(plan) else "",
    )


_TYPES = {
    "dfinal_state": "Optional[Tensor]",
    "initial_state": "Optional[Tensor]",
    "states": "Optional[Tensor]",
    "scale": "float",
    "final": "bool",
    "within": "bool",
    "keep": "bool",
}


def _low(name: str) -> bool:
    """Return True if a tensor of forward has the dtype of q."""
    return name not in ("seqs", "G", "betas")


def _saved(steps: Steps, held: list[str]) -> list[str]:
    """Return the tensors of forward that backward reads."""
    raw = ["o_raw"] if steps.plan.finishes else []
    return [*held, *raw] if steps.spec.saves_states else []


def _in_bf16(name: str) -> str:
    return f"{name}.bfloat16()" if _low(name) else name


def _fake(steps: Steps, name: str) -> str:
    apart = {"seqs": "q.new_empty(slots, dtype=torch.int32)", "o_raw": "v.new_empty(v.shape)"}
    return apart[name] if name in apart else steps.made()[name].call("")


def saved_of(plan: LinearAttentionPlan, kernels: Kernels) -> list[str]:
    """Return the results of forward that backward reads."""
    steps = Steps(plan)
    return _saved(steps, steps.held(kernels)) if plan.backward else []


def operands_of(interface: Interface) -> list[str]:
    """Return the operands of the operator of forward."""
    return [*_operands(interface), *(["keep"] if keeps(interface.plan) else [])]


def _operands(interface: Interface) -> list[str]:
    return [*interface.tensors, *interface.packing, "initial_state", "scale", "final", "within"]


def of_backward(interface: Interface, kernels: Kernels, backward: BackwardKernels) -> OfBackward:
    """Return the operator of backward."""
    steps = Steps(interface.plan)
    held = steps.held(kernels)
    saved = _saved(steps, held)
    kept = [*interface.tensors, *interface.packing, "initial_state", *saved]
    gradients = (f"grad_{name}" for name in interface.plan.learned)
    return OfBackward(
        operands=["do", "dfinal_state", *kept, "scale"],
        saved=saved,
        results=["dq", "dk", "dv", *gradients, "dinitial_state"],
        mapped=[f"{n}_raw, {n} = {n}, {n}_mapped" for n in "qk" if f"{n}_mapped" in held],
        kernels=backward,
    )


def _backward(
    interface: Interface, kernels: Kernels, backward: BackwardKernels, own: InFile | None
) -> Backward:
    plan, spec, tensors = interface.plan, interface.spec, interface.tensors
    steps, of = Steps(plan), of_backward(interface, kernels, backward)
    schedule = schedule_of(plan)
    gradients = list(plan.learned)
    likes = ["q", "k", "v", *gradients]
    returned = dict.fromkeys(operands_of(interface), "None") | {n: f"grad_{n}" for n in gradients}
    returned |= {name: f"d{name}" for name in ("q", "k", "v")}
    returned["initial_state"] = "None if initial_state is None else dinitial_state"
    return Backward(
        name=spec.name,
        bf16=spec.dtype == "bf16",
        varlen=spec.varlen,
        parameters=[f"{n}: {_TYPES.get(n, 'Tensor')}" for n in of.operands],
        operands=of.operands,
        results=f"tuple[{', '.join(['Tensor'] * (len(likes) + 1))}]",
        layouts=", ".join(["do", "dfinal_state", *tensors, "initial_state", *interface.packing]),
        state_shape=f"(N, HV, {interface.K}, {interface.V})",
        state_dtype=TORCH_DTYPES[spec.state_dtype],
        in_float32=[f"{n} = {n}.float()" for n in ("do", "q", "k", "v", *filter(_low, of.saved))],
        recomputed=[] if of.saved else steps.held(kernels),
        of_chunks=[*tensors, *interface.packing, "initial_state", "scale"],
        mapped=of.mapped,
        first=list(steps.first(kernels, backward)),
        steps=list(steps.backward(backward)),
        sums=steps.sums(),
        gradients=gradients,
        likes=likes,
        inputs=operands_of(interface),
        saved=of.saved,
        kept=of.operands[2:-1],
        returned=list(returned.values()),
        keeps=keeps(plan),
        chosen=schedule.chip.choice if schedule is not None else "",
        of_chip=own.backward if own is not None else "",
    )


def _function(interface: Interface) -> Function:
    spec = interface.spec
    operands = ", ".join(_operands(interface)[:-2])
    asked = "bool(output_final_state), bool(return_states)"
    learned = ", ".join(["q", "k", "v", *interface.plan.learned, "initial_state"])
    keep = [
        f"learned = ({learned})",
        "needs = _transformed() or any(x is not None and x.requires_grad for x in learned)",
        "keep = torch.is_grad_enabled() and needs",
    ]
    kind = Function if spec.varlen else FunctionOfChunks
    if keeps(interface.plan):
        asked, kind = f"{asked}, keep", KeepingFunction
    rows = f"B, _cdiv(T, {spec.chunk_size}), HV, {interface.K}, {interface.V}"
    states = "ends" if spec.varlen else f"ends.view({rows})"
    return kind(
        name=spec.name,
        signature=str(interface.signature()),
        summary=opening(spec),
        docstring=interface.docstring(),
        arguments=interface.arguments(spec.name),
        made=[
            "initial_state = None if initial_state is None else initial_state.contiguous()",
            *(keep if keeps(interface.plan) else []),
            f"o, final_state, ends = _forward_op({operands}, {asked})[:3]",
            "if return_states:",
            f"    return (o, final_state, {states}) if output_final_state else (o, {states})",
            "return (o, final_state) if output_final_state else o",
        ],
    )


def _decoding(interface: Interface, kernels: Kernels, steps: Steps) -> Decoding:
    spec = interface.spec
    name = f"{spec.name}_decode"
    operands = [*interface.tensors, *STEPPED, *interface.packing, "scale"]
    return Decoding(
        name=name,
        bf16=spec.dtype == "bf16",
        parameters=[f"{n}: {_TYPES.get(n, 'Tensor')}" for n in operands],
        operands=operands,
        varlen=spec.varlen,
        layouts=", ".join([*interface.tensors, *STEPPED, *interface.packing]),
        step=steps.decode(kernels),
        finish=steps.finish(kernels),
        function=Function(
            name=name,
            signature=str(interface.signature(decode=True)),
            summary="Step the state of each sequence in place, one token after the other.",
            docstring=interface.docstring(decode=True),
            arguments=interface.arguments(name, decode=True),
            made=[f"return _decode_op({', '.join(operands)})"],
        ),
    )
