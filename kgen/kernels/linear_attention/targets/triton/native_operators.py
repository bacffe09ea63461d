"""The operators of linear attention in C++: `operators.cpp` of a package."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from kgen.kernels.linear_attention.plan.planning import LinearAttentionPlan
from kgen.kernels.linear_attention.schedules import keeps
from kgen.kernels.linear_attention.targets.triton.interface import STEPPED, Interface
from kgen.kernels.linear_attention.targets.triton.native_tensors import Argument, Arguments
from kgen.kernels.linear_attention.targets.triton.steps import Steps
from kgen.targets.native import ATEN, Operators, in_struct
from kgen.targets.template import Template


@dataclass(frozen=True)
class Operand:
    """A parameter of an operator."""

    name: str
    """The name in the schema."""
    variable: str
    """The name in C++."""
    kind: str
    """The type in the schema."""
    type: str
    """The type in C++."""

    @property
    def param(self) -> str:
        """The declaration in C++."""
        return f"{self.type}{'' if self.type.endswith('&') else ' '}{self.variable}"


@dataclass(frozen=True)
class Operands:
    """Parameters of an operator, in order."""

    each: tuple[Operand, ...]

    @property
    def params(self) -> list[str]:
        return [one.param for one in self.each]

    @property
    def names(self) -> list[str]:
        """The names in C++."""
        return [one.variable for one in self.each]

    @property
    def addresses(self) -> list[str]:
        return [f"&{one.variable}" for one in self.each]

    @property
    def types(self) -> list[str]:
        return [one.type for one in self.each]

    @property
    def schema(self) -> str:
        """The arguments in a schema of PyTorch."""
        return f"({', '.join(f'{one.kind} {one.name}' for one in self.each)})"


@dataclass(frozen=True)
class Place:
    """A tensor for the C functions."""

    name: str
    label: str
    """The name in messages."""
    member: str
    """The name in the struct of arguments in C."""
    variable: str
    """The name in C++."""
    rank: int
    sizes: tuple[str, ...]
    """The sizes in C++, with the sizes of a call in `p`."""
    dtype: str
    """The name of the dtype in PyTorch's C++."""
    number: int = 0
    """The index among the results of forward, for a tensor that forward keeps."""


@dataclass(frozen=True)
class BackwardOperator(Template):
    """The backward operator, and autograd."""

    template: ClassVar[str] = "linear_attention/c/_operators_backward.j2"

    name: str
    function: str
    operator: Operands
    forward: Operands
    inputs: Operands
    others: Operands
    """The parameters of forward after its tensors."""
    dtype: str
    state: Place
    kept: tuple[Place, ...]
    """The tensors that forward keeps."""
    optional_keep: bool
    """True if forward keeps tensors only on request."""
    differentiable: tuple[str, ...]
    """The addresses of tensors with a gradient."""
    terms: tuple[Place, ...]
    """The gradients of buffers, or terms of them."""
    gradients: tuple[str, ...]
    """The gradient of each buffer."""
    like: tuple[str, ...]
    """The tensors with gradients."""

    @property
    def results(self) -> list[str]:
        """The types of the results."""
        return ["Tensor"] * (len(self.like) + 1)

    @property
    def at_initial(self) -> int:
        """The index of the initial state among the saved tensors."""
        return len(self.inputs.each)

    @property
    def unpacked(self) -> list[str]:
        """The tensors in the list that autograd passes."""
        return [f"tensors[{i}]" for i in range(self.at_initial)]

    @property
    def called(self) -> list[str]:
        """The arguments of the operator in the function of autograd."""
        first = self.at_initial + 1
        kept = [f"tensors[{first + i}]" for i in range(len(self.kept))]
        return ["dout", "dfinal_state", *self.unpacked, "initial_state", *kept, "scale"]

    @property
    def returned(self) -> list[str]:
        """The gradient of each argument of forward."""
        known = {x: f"gradients[{i}]" for i, x in enumerate(self.like)}
        last = f"initial_state.has_value() ? gradients[{len(self.like)}] : Tensor()"
        known["initial_state"] = last
        return [known.get(x, "Tensor()") for x in self.forward.names]


@dataclass(frozen=True)
class DecodeOperator(Template):
    """The operator that steps states."""

    template: ClassVar[str] = "linear_attention/c/_operators_decode.j2"

    name: str
    operator: Operands
    inputs: Operands
    state_dtype: str
    each: Place
    """The states after each token."""


@dataclass(frozen=True, kw_only=True)
class LayerOperators(Operators):
    """The file `operators.cpp`."""

    template: ClassVar[str] = "linear_attention/c/operators.cpp.j2"

    inputs: Operands
    """The tensors that all operators take."""
    forward: Operands
    tensors: tuple[Place, ...]
    varlen: bool
    BT: int
    final_state: Place
    ends: Place
    """The states of chunks, as PyTorch has them."""
    chunk_states: Place
    """The same tensor, as C has it."""
    kept: tuple[Place, ...]
    """The tensors that forward keeps."""
    keeps: str
    """The condition in C++ that forward keeps them."""
    keep_params: tuple[str, ...]
    """The flag by which callers ask for them, if there is one."""
    keep_names: tuple[str, ...]
    differentiable: tuple[str, ...]
    """The addresses of tensors with a gradient."""
    backward: BackwardOperator | None
    decode: DecodeOperator | None

    @property
    def least(self) -> int:
        """The tokens of a chunk except one."""
        return self.BT - 1

    @property
    def forward_results(self) -> list[str]:
        """The types of the results of forward."""
        return ["Tensor"] * (3 + len(self.kept))


@dataclass(frozen=True)
class Call(Template):
    """A function of a package that calls operators in C++."""

    function: str
    signature: str
    usual: tuple[str, ...]
    """The tensors whose classes the function checks."""
    conditions: str
    """Further conditions, as terms to append."""
    default_scale: str
    operands: tuple[str, ...]
    arguments: tuple[str, ...]
    """The arguments of the emitted function."""


@dataclass(frozen=True)
class DecodeCall(Call):
    """The function that steps states."""

    template: ClassVar[str] = "linear_attention/c/_call_decode.py.j2"


@dataclass(frozen=True)
class LayerCall(Call):
    """The function of the spec."""

    template: ClassVar[str] = "linear_attention/c/call.py.j2"

    keep: str
    """The condition of gradients, if forward keeps tensors only on request."""
    chunks: tuple[str, ...]
    """The sizes of the states of chunks that the function returns, if the operator has others."""
    decode: DecodeCall | None


def operators_of(
    interface: Interface, arguments: Arguments, name: str, license: str
) -> LayerOperators:
    """Return the operators of a plan. Its C functions begin with `name`."""
    plan, spec = interface.plan, interface.spec
    inputs = Operands(tuple(_tensor(x) for x in _inputs(interface)))
    keep = (Operand("keep", "keep", "bool", "bool"),) if keeps(plan) else ()
    others = (_optional("initial_state"), _SCALE, _flag("final"), _flag("within"), *keep)
    forward = Operands((*inputs.each, *others))
    kept = tuple(
        replace(_place(x, f"kept_{x.name}"), label=x.name, number=3 + i)
        for i, x in enumerate(arguments.kept)
    )
    learned = ("q", "k", "v", *(plan.learned if plan.backward else ()))
    differentiable = tuple(f"&{_variable(x)}" for x in learned)
    chunk_states = _place(arguments.chunk_states)
    states = ("p.slots", "p.HV", *chunk_states.sizes[-2:])
    decode = f"{spec.name}_decode"
    own = (*arguments.inputs, *([arguments.cu_seqlens] if arguments.cu_seqlens else []))
    found = LayerOperators(
        name=name,
        license=license,
        function=spec.name,
        places=(("_forward_op", spec.name), *([("_decode_op", decode)] if plan.decode else [])),
        inputs=inputs,
        forward=forward,
        tensors=tuple(_place(x, _variable(x.name)) for x in own),
        varlen=spec.varlen,
        BT=spec.chunk_size,
        final_state=_place(arguments.final_state),
        ends=replace(chunk_states, sizes=states),
        chunk_states=chunk_states,
        kept=kept,
        keeps="keep" if keep else "true",
        keep_params=tuple(one.param for one in keep),
        keep_names=tuple(one.variable for one in keep),
        differentiable=differentiable,
        backward=None,
        decode=_decode(interface, arguments, name, inputs) if plan.decode else None,
    )
    backward = _backward(plan, arguments, found, Operands(others)) if plan.backward else None
    return replace(found, backward=backward)


def _backward(
    plan: LinearAttentionPlan, arguments: Arguments, of: LayerOperators, others: Operands
) -> BackwardOperator:
    kept = [
        _optional(x.name, x.variable) if x.name == "states" else _tensor(x.name, x.variable)
        for x in of.kept
    ]
    first = (_tensor("do", "dout"), _optional("dfinal_state"))
    operands = (*first, *of.inputs.each, _optional("initial_state"), *kept, _SCALE)
    terms = {one.argument.name: one.argument for one in arguments.learned}
    return BackwardOperator(
        name=of.name,
        function=of.function,
        operator=Operands(operands),
        forward=of.forward,
        inputs=of.inputs,
        others=others,
        dtype=ATEN[plan.spec.dtype],
        state=of.final_state,
        kept=of.kept,
        optional_keep=keeps(plan),
        differentiable=of.differentiable,
        terms=tuple(_place(x, f"term_{x.name}") for x in terms.values()),
        gradients=tuple(_gradient(plan, name) for name in plan.learned),
        like=("q", "k", "v", *map(_variable, plan.learned)),
    )


def _gradient(plan: LinearAttentionPlan, name: str) -> str:
    """Return the gradient of a buffer in C++, as `Steps.sums` does in Python."""
    steps, x = Steps(plan), _variable(name)
    sources, tokens = steps.sources(name), plan.spec.buffers[name].tokens
    over = "{ 0, 1 }" if steps.shared(name) else "{ 0 }"
    terms = [f"term_{one}" if tokens else f"kgen::summed(term_{one}, {over})" for one in sources]
    if not terms:  # the derivative is zero everywhere
        return f"{x}.new_zeros({x}.sizes())"
    total = terms[0] + "".join(f".add({one})" for one in terms[1:])
    return total if tokens and len(terms) == 1 else f"{total}.to({x}.scalar_type())"


def _decode(
    interface: Interface, arguments: Arguments, name: str, inputs: Operands
) -> DecodeOperator:
    at = len(interface.tensors)
    state, states = STEPPED
    written = (
        Operand(state, state, f"Tensor(a{at}!)", _TENSOR),
        Operand(states, states, f"Tensor(a{at + 1}!)?", _OPTIONAL),
    )
    operands = (*inputs.each[:at], *written, *inputs.each[at:], _SCALE)
    return DecodeOperator(
        name=name,
        operator=Operands(operands),
        inputs=inputs,
        state_dtype=ATEN[interface.spec.state_dtype],
        each=_place(arguments.token_states),
    )


_TENSOR, _OPTIONAL = "const Tensor &", "const Optional &"
_SCALE = Operand("scale", "scale", "float", "double")


def _inputs(interface: Interface) -> Iterable[str]:
    return (*interface.tensors, *interface.packing)


def _tensor(name: str, variable: str = "") -> Operand:
    return Operand(name, variable or _variable(name), "Tensor", _TENSOR)


def _optional(name: str, variable: str = "") -> Operand:
    return Operand(name, variable or name, "Tensor?", _OPTIONAL)


def _flag(name: str) -> Operand:
    return Operand(name, name, "bool", "bool")


def _variable(name: str) -> str:
    """Return the name in C++. Names that users choose get a prefix, so that none clashes."""
    return name if name in ("q", "k", "v", "cu_seqlens") else f"given_{name}"


def _place(x: Argument, variable: str = "") -> Place:
    sizes = tuple(in_struct(size, "p.") for size in x.extents)
    return Place(x.name, x.label, x.member, variable, x.rank, sizes, ATEN[x.element])


def call_of(interface: Interface) -> LayerCall:
    """Return the functions that call the operators."""
    plan, spec = interface.plan, interface.spec
    tensors, signature = _called(interface), interface.signature()
    learned = ("q", "k", "v", *map(interface.label, plan.learned)) if plan.backward else ()
    refused = [f"not {x}.requires_grad" for x in tensors if x not in learned]
    initial = "initial_state is not None and initial_state.requires_grad"
    if not plan.backward:
        refused.append(f"not ({initial})")
    needs = " or ".join([*(f"{x}.requires_grad" for x in learned), f"({initial})"])
    flags = ["bool(output_final_state)", "bool(return_states)"]
    rows = ("q.shape[0]", f"-(-q.shape[1] // {spec.chunk_size})", "v.shape[2]")
    return LayerCall(
        function=spec.name,
        signature=str(signature),
        usual=(*tensors, *interface.packing, _there("initial_state")),
        conditions=_terms([*_packed(interface), *refused]),
        default_scale=interface.scale,
        operands=(
            *(*tensors, *interface.packing, "initial_state", "_factor", *flags),
            *(["_keep"] if keeps(plan) else []),
        ),
        arguments=tuple(signature.arguments),
        keep=needs if keeps(plan) else "",
        chunks=() if spec.varlen else (*rows, str(interface.K), str(interface.V)),
        decode=_decode_call(interface) if plan.decode else None,
    )


def _decode_call(interface: Interface) -> DecodeCall:
    tensors, signature = _called(interface), interface.signature(decode=True)
    state, states = STEPPED
    needs = [*(f"{x}.requires_grad" for x in (*tensors, state)), f"{_there(states)}.requires_grad"]
    required = f"not (torch.is_grad_enabled() and ({' or '.join(needs)}))"
    return DecodeCall(
        function=f"{interface.spec.name}_decode",
        signature=str(signature),
        usual=(*tensors, *interface.packing, state, _there(states)),
        conditions=_terms([*_packed(interface), required]),
        default_scale=interface.scale,
        operands=(*tensors, *STEPPED, *interface.packing, "_factor"),
        arguments=tuple(signature.arguments),
    )


def _there(name: str) -> str:
    """Return a tensor that may be None, or else q."""
    return f"(q if {name} is None else {name})"


def _called(interface: Interface) -> tuple[str, ...]:
    """Return the names of q, k, v and the buffers for callers."""
    return tuple(map(interface.label, interface.tensors))


def _packed(interface: Interface) -> list[str]:
    return [f"{name}.dtype == torch.int32" for name in interface.packing]


def _terms(conditions: Iterable[str]) -> str:
    return "".join(f" and {condition}" for condition in conditions)
