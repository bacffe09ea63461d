"""The C++ example of norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kgen.expr.nodes import variables
from kgen.kernels.norm.plan.planning import Gradient, NormPlan
from kgen.kernels.norm.targets.triton.native_tensors import LETTERS, Argument, Arguments
from kgen.spec.load import Loaded
from kgen.targets.code import Code, Name
from kgen.targets.native import File, Parameter, prefix_of
from kgen.targets.native_reference import Given, Sized, dtype_of, in_cpp, sized, spelled

ROWS, INTEGER, REAL = 37, 3, 0.5
"""The rows and run-time parameters of the example."""
ERRORS = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 1e-4, "fp8_e4m3": 7e-2}
"""Tolerances by dtype, relative to the largest magnitude."""
NUMBERS: Mapping[Code, Code] = {Name(name): Name(letter) for name, letter in LETTERS.items()}
"""The numbers of a call in the example."""
AFFINE = {"weight": "dy * x_hat[size_t(d)]", "bias": "dy"}
"""The terms of the gradients of weight and bias, in C++."""


@dataclass(frozen=True)
class Drawn:
    """A tensor that the example fills."""

    member: str
    draw: str
    """The argument of `Tensor::draw`."""


@dataclass(frozen=True)
class Read:
    """A tensor that expressions read."""

    value: str
    """The member of `Values`."""
    member: str
    along: str


@dataclass(frozen=True)
class Compared:
    """A gradient that the example computes; `value` is the member of `Values` to which it
    belongs.
    """

    member: str
    along: str
    value: str


@dataclass(frozen=True)
class Affine:
    """The gradient of a weight or a bias: each element adds its `term`."""

    member: str
    term: str


@dataclass(frozen=True, kw_only=True)
class NormExample(File):
    """`example.cpp`."""

    template: ClassVar[str] = "norm/c/example.cpp.j2"

    rows: int
    heads: int
    width: int
    eps: str
    tensors: tuple[Sized, ...]
    drawn: tuple[Drawn, ...]
    params: tuple[Given, ...]
    values: tuple[str, ...]
    """The members of `Values`."""
    read: tuple[Read, ...]
    input_mod: str
    output_mod: str
    mean: str
    """The term of an element in the mean of its row."""
    weight: str
    bias: str
    backward: bool
    gradients: tuple[Compared, ...]
    of_input: tuple[Compared, ...]
    """The gradients of the operands of input_mod."""
    of_output: tuple[Compared, ...]
    of_affine: tuple[Affine, ...]
    c2: str
    """The term of an element in the mean of dx_hat."""
    dh_out: str
    per_row: bool
    """True if rows have scales."""
    allowed: str
    """The tolerance."""


def norm_example(
    loaded: Loaded,
    plan: NormPlan,
    arguments: Arguments,
    params: Sequence[Parameter],
    sizes: Mapping[str, Sequence[int]],
) -> NormExample:
    """Return the example of a spec; `sizes` has the sizes that the spec leaves open.

    Raise `KgenError` if a function of the expressions has no C++ spelling.
    """
    spec = plan.spec
    along = {o.name: o.along for o in plan.operands}
    inputs = [t for t in arguments.inputs if t.name in along or t.name == "scale"]
    others = (*arguments.outputs, *arguments.upstream, *arguments.gradients)
    members = {t.name: t.member for t in arguments.all}
    stored = [g for g in plan.backward.gradients if g.same_as is None] if plan.backward else []
    gradients = [Compared(members[g.name], g.along, f"{g.of}_") for g in stored]
    used = _used(loaded, plan)
    input_mod, output_mod = _expressions(loaded, plan)
    return NormExample(
        name=prefix_of(loaded),
        license=spec.license.in_comment(),
        rows=ROWS,
        heads=sizes["heads"][0] if spec.heads == "any" else spec.heads or 1,
        width=_width(plan, sizes),
        eps=repr(float(spec.eps)),
        tensors=tuple(sized(t, "", NUMBERS) for t in (*inputs, *others)),
        drawn=tuple(Drawn(t.member, _draw(t)) for t in (*inputs, *arguments.upstream)),
        params=tuple(Given(p.member, REAL if p.real else INTEGER) for p in params),
        values=tuple(f"{name}_" for name in (*along, "y")),
        read=tuple(Read(f"{n}_", members[n], a) for n, a in along.items()),
        input_mod=input_mod,
        output_mod=output_mod,
        mean="h[size_t(d)] / D" if plan.layer else "0.0",
        weight=f"({spec.weight_offset!r} + v.weight_)" if "weight" in along else "1.0",
        bias="v.bias_" if "bias" in along else "0.0",
        backward=plan.backward is not None,
        gradients=tuple(gradients),
        of_input=tuple(
            c for c, g in zip(gradients, stored, strict=True) if g.of in used["input_mod"]
        ),
        of_output=tuple(
            c for c, g in zip(gradients, stored, strict=True) if g.of in used["output_mod"]
        ),
        of_affine=tuple(Affine(members[g.name], AFFINE[g.of]) for g in stored if g.of in AFFINE),
        c2="dx_hat[size_t(d)] / D" if plan.layer else "0.0",
        dh_out="tensors.dh_out.numbers[of_element(row, d)]"
        if plan.stores_h and plan.backward
        else "0.0",
        per_row=bool(spec.quantize and spec.quantize.scale == "per_row"),
        allowed=repr(_allowed(plan, stored)),
    )


def _width(plan: NormPlan, sizes: Mapping[str, Sequence[int]]) -> int:
    width = plan.spec.width
    if isinstance(width, int):
        return width
    return (sizes["width"] if width == "any" else width)[0]


def _used(loaded: Loaded, plan: NormPlan) -> Mapping[str, frozenset[str]]:
    """Return the variables of both expressions."""
    added = {o.name for o in plan.operands} & {"x", "residual"}
    plain = {"input_mod": frozenset(added), "output_mod": frozenset({"y"})}
    return plain | {name: variables(tree) for name, tree in loaded.trees.items()}


def _expressions(loaded: Loaded, plan: NormPlan) -> tuple[str, str]:
    """Return both expressions in C++."""
    operands = [o.name for o in plan.operands]
    names = {name: f"at.{name}_" for name in (*operands, "y")}
    for name, param in plan.spec.params.items():
        value = param.value if param.value is not None else INTEGER if param.type == "int" else REAL
        names[name] = f"INT64_C({value})" if param.type == "int" else repr(float(value))
    with spelled(loaded):
        trees = {name: in_cpp(tree, names) for name, tree in loaded.trees.items()}
    plain = "at.x_ + at.residual_" if "residual" in operands else "at.x_"
    return trees.get("input_mod", plain), trees.get("output_mod", "at.y_")


def _allowed(plan: NormPlan, gradients: Sequence[Gradient]) -> float:
    return max(
        ERRORS[dtype] for dtype in (*plan.spec.dtypes.values(), *(g.dtype for g in gradients))
    )


def _draw(tensor: Argument) -> str:
    if tensor.name == "scale":
        return "[](int64_t) { return 0.05; }"
    if dtype_of(tensor.element) in ("INT32", "INT64", "BOOL"):
        return "[](int64_t i) { return double(i % 2); }"
    return "1.0"
