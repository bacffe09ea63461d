"""The operators of attention in C++: `operators.cpp` of a package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kgen.expr.nodes import Type
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.spec import ANY, Buffer
from kgen.kernels.attention.targets.triton.exact import Exact
from kgen.kernels.attention.targets.triton.interface import Interface, operator_of
from kgen.kernels.attention.targets.triton.native_tensors import Tensors
from kgen.kernels.attention.targets.triton.shared import narrow_values
from kgen.targets.native import ATEN, Operators, Parameter, Tensor
from kgen.targets.signature import Signature
from kgen.targets.template import Template, filled


@dataclass(frozen=True)
class TensorInput:
    """A tensor among the arguments of an operator."""

    name: str
    """The name in the schema."""
    label: str
    """The name in messages."""
    member: str
    """The name in the struct of arguments in C."""
    variable: str
    """The name in C++."""
    rank: int
    dtype: str


@dataclass(frozen=True)
class NumberInput:
    """A number among the arguments of an operator, other than the scale."""

    name: str
    member: str
    variable: str
    real: bool

    @property
    def param(self) -> str:
        """The parameter in C++."""
        return f"double {self.variable}" if self.real else f"c10::SymInt {self.variable}"

    @property
    def value(self) -> str:
        """The value for C."""
        return self.variable if self.real else f"{self.variable}.expect_int()"

    @property
    def saved(self) -> str:
        """The value that autograd saved."""
        kind = "toDouble" if self.real else "toSymInt"
        return f'context->saved_data["{self.variable}"].{kind}()'


@dataclass(frozen=True)
class Arguments:
    """The arguments of the forward operators."""

    tensors: tuple[TensorInput, ...]
    numbers: tuple[NumberInput, ...]

    @property
    def tensor_names(self) -> list[str]:
        return [x.variable for x in self.tensors]

    @property
    def addresses(self) -> list[str]:
        return [f"&{x}" for x in self.tensor_names]

    @property
    def number_names(self) -> list[str]:
        return ["scale", *(n.variable for n in self.numbers)]

    @property
    def number_params(self) -> list[str]:
        return ["double scale", *(n.param for n in self.numbers)]

    @property
    def params(self) -> list[str]:
        """All parameters in C++."""
        return [*(f"const Tensor &{x}" for x in self.tensor_names), *self.number_params]

    @property
    def given(self) -> list[str]:
        """The names of all parameters."""
        return [*self.tensor_names, *self.number_names]

    @property
    def types(self) -> list[str]:
        """The types of all parameters."""
        return [
            *("const Tensor &" for _ in self.tensors),
            *(p.split()[0] for p in self.number_params),
        ]

    @property
    def schema(self) -> str:
        """The arguments in a schema of PyTorch."""
        return self.schema_after()

    def schema_after(self, *first: str) -> str:
        """Return the arguments in a schema of PyTorch, after others."""
        numbers = [f"{'float' if n.real else 'SymInt'} {n.name}" for n in self.numbers]
        tensors = [f"Tensor {x.name}" for x in self.tensors]
        return f"({', '.join([*first, *tensors, 'float scale', *numbers])})"


@dataclass(frozen=True)
class SinkGradient:
    """The gradient of sinks, which kernels store in parts."""

    sizes: str
    over: str
    """The dimensions to sum over."""


@dataclass(frozen=True)
class BackwardOperator(Arguments, Template):
    """The backward operator, and autograd."""

    template: ClassVar[str] = "attention/c/_operators_backward.j2"

    name: str
    rank: int
    """Number of dimensions of q."""
    dtype: str
    lse_rank: int
    lse_dtype: str
    differentiable: tuple[str, ...]
    """The addresses of tensors with a gradient."""
    empty_like: tuple[str, ...]
    """The allocations of dq, dk and dv."""
    dlse: str
    """The gradient of the log-sum-exp in float32."""
    sinks: SinkGradient | None

    @property
    def result_types(self) -> list[str]:
        return ["Tensor"] * (4 if self.sinks is not None else 3)

    @property
    def unpacked(self) -> list[str]:
        """The tensors in the list that autograd passes."""
        return [f"tensors[{i}]" for i in range(len(self.tensors))]

    @property
    def at_out(self) -> int:
        """The index of the output among the saved tensors."""
        return len(self.tensors)

    @property
    def at_lse(self) -> int:
        return len(self.tensors) + 1

    @property
    def saved_numbers(self) -> list[str]:
        return ['context->saved_data["scale"].toDouble()', *(n.saved for n in self.numbers)]

    @property
    def returned(self) -> list[str]:
        """The gradient of each argument."""
        of_sinks = {"sinks": "gradients[3]"} if self.sinks is not None else {}
        known = {"q": "gradients[0]", "k": "gradients[1]", "v": "gradients[2]"} | of_sinks
        numbers = ["Tensor()" for _ in self.number_names]
        return [*(known.get(x.name, "Tensor()") for x in self.tensors), *numbers]


@dataclass(frozen=True, kw_only=True)
class AttentionOperators(Operators, Arguments):
    """The file `operators.cpp`."""

    template: ClassVar[str] = "attention/c/operators.cpp.j2"

    float32: str
    """The condition that tensors of an open dtype are float32, as a term to append."""
    empty_out: str
    lse_sizes: str
    lse_dtype: str
    differentiable: tuple[str, ...]
    backward: BackwardOperator | None

    @property
    def backward_schema(self) -> str | None:
        """The arguments of the backward operator in a schema of PyTorch."""
        if self.backward is None:
            return None
        own = ("Tensor dout", "Tensor? dlse", "Tensor out", "Tensor lse")
        return self.backward.schema_after(*own)


@dataclass(frozen=True)
class OperatorCall(Template):
    """The Python function of a package that calls the operators in C++."""

    template: ClassVar[str] = "attention/c/call.py.j2"

    function: str
    signature: str
    tensors: tuple[str, ...]
    conditions: str
    """Further conditions, as terms to append."""
    default_scale: str
    natural_lse: str
    arguments: tuple[str, ...]


def why_in_python(plan: AttentionPlan) -> str | None:
    """Return why a spec has no operators in C++, or None if it has them."""
    if plan.block_mask is not None:
        return "the spec needs a block mask"
    if plan.backward and (plan.gradients or any(b.grad for b in plan.spec.buffers.values())):
        return "a buffer has a gradient"
    if narrow_values(plan):
        return "v has 16 or 32 columns"
    return None


def operators_of(
    plan: AttentionPlan, name: str, license: str, tensors: Tensors
) -> AttentionOperators:
    """Return the operators of a plan. Its C functions begin with `name`."""
    spec, packed = plan.spec, plan.spec.varlen
    arguments = Arguments(
        tuple(_input(x, spec.buffers) for x in tensors.inputs),
        tuple(_number(p) for p in tensors.params),
    )
    open_dtype = [_variable(x, spec.buffers) for x in tensors.inputs if _open(plan, x)]
    width, lse_dtype = spec.head_dim.v, ATEN[tensors.lse.element]
    rows = (
        "q.sym_size(0), q.sym_size(1)" if packed else "q.sym_size(0), q.sym_size(1), q.sym_size(2)"
    )
    differentiable = ("&q", "&k", "&v", *(["&sinks"] if spec.sinks else []))
    return filled(
        AttentionOperators,
        arguments,
        name=name,
        license=license,
        function=spec.name,
        places=(("_out_op", spec.name), ("_out_and_lse_op", f"{spec.name}_lse")),
        float32="".join(f" && {x}.scalar_type() == at::kFloat" for x in open_dtype),
        empty_out=f"kgen::empty{'' if packed else '_as'}({{{rows}, {width}}}, q)",
        lse_sizes="q.sym_size(1), q.sym_size(0)" if packed else rows,
        lse_dtype=lse_dtype,
        differentiable=differentiable,
        backward=_backward(plan, name, tensors, arguments, differentiable)
        if plan.backward
        else None,
    )


def _backward(
    plan: AttentionPlan,
    name: str,
    tensors: Tensors,
    arguments: Arguments,
    differentiable: tuple[str, ...],
) -> BackwardOperator:
    packed = plan.spec.varlen
    form = "at::empty_symint({x}.sym_sizes(), {x}.options())"
    if not packed:
        sizes = ", ".join(f"{{x}}.sym_size({axis})" for axis in range(4))
        form = f"kgen::empty_as({{{{{sizes}}}}}, {{x}})"
    sinks = None
    if plan.spec.sinks:
        sizes = (
            "q.size(1), (q.size(0) + 63) / 64"
            if packed
            else "q.size(0), q.size(1), (q.size(2) + 63) / 64"
        )
        sinks = SinkGradient(sizes, "1" if packed else "0, 2")
    return filled(
        BackwardOperator,
        arguments,
        name=name,
        rank=3 if packed else 4,
        dtype=ATEN[plan.spec.dtype],
        lse_rank=tensors.lse.rank,
        lse_dtype=ATEN[tensors.lse.element],
        differentiable=differentiable,
        empty_like=tuple(form.format(x=x) for x in "qkv"),
        dlse="of[1].to(at::kFloat)" if plan.exact else "of[1]",
        sinks=sinks,
    )


def _input(x: Tensor, buffers: Mapping[str, Buffer]) -> TensorInput:
    # In C, one number is a tensor of one element. In PyTorch, it has no dimension.
    rank = x.rank if x.name not in buffers or buffers[x.name].shape else 0
    return TensorInput(x.name, x.label, x.member, _variable(x, buffers), rank, ATEN[x.element])


def _variable(x: Tensor, buffers: Mapping[str, Buffer]) -> str:
    """Return the name in C++. Names that users choose get a prefix, so that none clashes."""
    return f"given_{x.member}" if x.name in buffers else x.member


def _number(p: Parameter) -> NumberInput:
    return NumberInput(p.name, p.member, f"given_{p.member}", p.real)


def _open(plan: AttentionPlan, x: Tensor) -> bool:
    """True if a tensor may have several dtypes. Machine code for C has one."""
    buffer = plan.spec.buffers.get(x.name)
    return x.name == "sinks" if buffer is None else len(buffer.dtypes) > 1


def call_of(plan: AttentionPlan) -> OperatorCall | None:
    """Return the function that calls the operators. None if only Python checks all arguments."""
    spec, interface = plan.spec, Interface(plan)
    if interface.runtime or any(ANY in b.shape for b in spec.buffers.values()):
        return None
    packed = ("cu_seqlens_q", "cu_seqlens_k") if spec.varlen else ()
    defaults = (("scale", "None"), ("return_lse", "False"))
    signature = Signature(("q", "k", "v", *packed), tuple(interface.required()), defaults)
    tensors = tuple(interface.called(name) for name in operator_of(interface).passed)
    reals = [interface.called(n) for n, b in spec.buffers.items() if b.element is Type.FLOAT]
    sinks = ["sinks"] if spec.sinks else []
    refused = reals if plan.backward else ["q", "k", "v", *reals, *sinks]
    several = [interface.called(n) for n, b in spec.buffers.items() if len(b.dtypes) > 1] + sinks
    conditions = [f"not {name}.requires_grad" for name in refused]
    conditions += [f"{name}.dtype == torch.float32" for name in several]
    return OperatorCall(
        function=spec.name,
        signature=str(signature),
        tensors=tensors,
        conditions="".join(f" and {condition}" for condition in conditions),
        default_scale=f"{spec.head_dim.qk} ** -0.5",
        natural_lse=Exact(plan.exact).natural_lse,
        arguments=tuple(signature.arguments),
    )
