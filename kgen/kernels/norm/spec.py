"""The model of specs with `kernel: norm`: one layer norm or RMS norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from kgen.diagnostics import did_you_mean, shown
from kgen.expr.nodes import Node, Type, variables
from kgen.expr.scope import Scope
from kgen.expr.spelling import Accuracy
from kgen.spec.common import (
    ELEMENTS,
    Expression,
    License,
    Param,
    Summary,
    checked_name,
    checked_passes,
    compiled_in,
    differentiable,
    is_integer,
    refuse,
    taken_names,
)
from kgen.spec.problems import SpecModel, problem
from kgen.spec.targets import targets_model
from kgen.spec.user_text import UserText

SHAPES = {
    ("ROWS", "WIDTH"): "element",
    ("ROWS",): "row",
    ("WIDTH",): "column",
    ("H", "WIDTH"): "column",
}
"""The shapes that a buffer may have, and the axis along which each varies."""
RESERVED = frozenset(
    {
        *(
            "kernel",
            "shape",
            "shared",
            "resident",
            "groups",
            "gradients",
            "arguments",
            "device",
            "means",
            "aligned",
            "label",
        ),
        *("tensor", "dtype", "ctx", "outputs", "step", "shares", "save", "driver", "ctypes", "functools"),
        *("x", "residual", "weight", "bias", "scale", "eps", "out", "inf", "width", "heads"),
        *(
            "h",
            "mean",
            "rstd",
            "x_hat",
            "x_hat_rounded",
            "y",
            "dout",
            "dy",
            "dx_hat",
            "c1",
            "c2",
            "dh",
            "dh_out",
        ),
        *(
            "row",
            "rows",
            "col",
            "cols",
            "live",
            "part",
            "parts",
            "hashlib",
            "math",
            "os",
            "torch",
            "triton",
            "tl",
        ),
    }
)
PASSES = ("forward", "backward")
MAX_WIDTH = 2**18

Name = Annotated[str, AfterValidator(checked_name), AfterValidator(refuse(RESERVED))]
Real = Literal["bf16", "fp16", "fp32"]

# --- parts ------------------------


class Dtypes(SpecModel):
    """Dtypes of the tensors. All computation is in fp32."""

    input: Annotated[Real, Field(examples=["bf16"])]
    """Dtype of x."""
    weight: Real | None = None
    """Dtype of weight and bias. The default is the dtype of the input."""
    output: Real | None = None
    """Dtype of the output. The default is the dtype of the input."""
    residual: Real | None = None
    """Dtype of the residual, as input and output. The default is the dtype of the input."""


def _dtypes(value: Any) -> Any:
    if isinstance(value, dict | Dtypes):
        return value
    if value in ("fp32", "bf16", "fp16"):
        return {"input": value}
    hint = did_you_mean(value, ("fp32", "bf16", "fp16")) if isinstance(value, str) else None
    message = f"`dtype` must be one of fp32, bf16, fp16 or a mapping, not {shown(value)}"
    raise problem("bad-value", message, hint or "write `dtype: bf16` or `dtype: {input: bf16, weight: fp32}`")


def _width(value: Any) -> Any:
    def fits(n: Any) -> bool:
        return is_integer(n) and 1 <= n <= MAX_WIDTH

    if value == "any" or fits(value):
        return value
    if isinstance(value, list | tuple) and value and all(map(fits, value)):
        if len(set(value)) == len(value):
            return tuple(value)
        raise problem("bad-value", "`width` names a number twice", "write each width once")
    hint = "write `width: 4096`, `width: [64, 128]` or `width: any`"
    raise problem("bad-value", f"a width is a number from 1 to {MAX_WIDTH}, not {shown(value)}", hint)


def _heads(value: Any) -> Any:
    if value is None or value == "any" or (is_integer(value) and 1 <= value < 2**16):
        return value
    hint = "write `heads: 32` or `heads: any`"
    raise problem("bad-value", f"`heads` must be a number of at least 1, or `any`, not {shown(value)}", hint)


def _shape(value: Any) -> Any:
    if isinstance(value, list | tuple) and tuple(value) in SHAPES:
        return tuple(value)
    hint = "write `[ROWS, WIDTH]`, `[ROWS]` or `[WIDTH]` (with `heads`: `[H, WIDTH]`)"
    raise problem("bad-shape", f"{shown(value)} is not a shape of a buffer", hint)


class Buffer(SpecModel):
    """A tensor that the expressions use by its name. The name is its value at the current element."""

    shape: Annotated[
        tuple[Literal["ROWS", "WIDTH", "H"], ...],
        Field(strict=False, examples=[["ROWS", "WIDTH"]]),
        BeforeValidator(_shape),
    ]
    """[ROWS, WIDTH]: as x. [ROWS]: as x without its last dimension. [WIDTH] or [H, WIDTH]: as weight."""
    dtype: Annotated[Literal["fp32", "bf16", "fp16", "int32", "int64", "bool"], Field(examples=["bf16"])]
    """Dtype in memory. Kernels compute in fp32 and int32."""
    grad: bool = False
    """True if the backward pass returns its gradient."""

    @property
    def element(self) -> Type:
        """The type of one element in expressions."""
        return ELEMENTS[self.dtype]

    @property
    def along(self) -> str:
        """The axis along which it varies: `element`, `row` or `column`."""
        return SHAPES[self.shape]

    @model_validator(mode="after")
    def _check(self) -> Buffer:
        if self.grad and self.element is not Type.FLOAT:
            message, hint = f"a buffer of {self.dtype} has no gradient", "remove `grad`, or use a float dtype"
            raise problem("bad-grad", message, hint, at=("grad",), key=True)
        return self


class Quantize(SpecModel):
    """Quantization of the output to eight bits."""

    dtype: Literal["fp8_e4m3"]
    """Dtype of the output. Its largest number is 448; larger values become 448."""
    scale: Literal["per_tensor", "per_row"]
    """per_tensor: one number, the argument `scale`. per_row: largest magnitude of the row / 448, which is returned."""


if TYPE_CHECKING:
    from kgen.spec.targets import Targets
else:
    Targets = targets_model("norm", __name__)


# --- the spec ------------------------


class NormSpec(SpecModel):
    """One norm: output_mod(x_hat * (weight + weight_offset) + bias), where x_hat is input_mod(x), normed by rows."""

    kernel: Literal["norm"]
    """The family of kernels."""
    name: Annotated[Name, Field(examples=["rms_norm"])]
    """Name of the emitted function, lower_snake_case."""
    summary: Summary = UserText("")
    """One line for people, which begins the docstring of the emitted file."""
    license: License = UserText("Apache-2.0")
    """SPDX identifier for the emitted files."""
    norm: Annotated[Literal["layer", "rms"], Field(examples=["rms"])]
    """layer: (h - mean) / sqrt(var + eps); rms: h / sqrt(mean of squares + eps)."""
    width: Annotated[
        int | tuple[int, ...] | Literal["any"],
        BeforeValidator(
            _width,
            json_schema_input_type=Annotated[int, Field(ge=1, le=MAX_WIDTH)] | list[int] | Literal["any"],
        ),
        Field(examples=["any"]),
    ]
    """Elements of a row: a number, a list of numbers, or `any`."""
    rows: Literal["any"] = "any"
    """Rows of a call."""
    heads: Annotated[
        int | Literal["any"] | None,
        BeforeValidator(_heads, json_schema_input_type=Annotated[int, Field(ge=1)] | Literal["any"]),
    ] = None
    """The number of heads H, or `any`. Then x is [..., H, WIDTH], and weight and bias are [H, WIDTH]."""
    dtype: Annotated[
        Dtypes, BeforeValidator(_dtypes, json_schema_input_type=Real | Dtypes), Field(examples=["bf16"])
    ]
    """Dtype of all tensors, or {input, weight, output, residual}."""
    weight: bool = True
    """True if there is a weight."""
    weight_offset: Annotated[int, Field(ge=0, le=1)] = 0
    """Added to the weight: 1 for weights that are stored around zero, as in Gemma."""
    bias: bool = False
    """True if there is a bias."""
    eps: Annotated[float, Field(ge=0, le=1, strict=False)] = 1e-6
    """Added to the variance. This is the default of the argument `eps`."""
    # The sum is rounded before the norm, so backward reads only the returned sum, and neither x nor the residual.
    residual: Literal["in", "in_out"] | None = None
    """in: `residual` is an argument. in_out: the sum, rounded to the dtype of the residual, is normed and returned."""
    input_mod: Expression = None
    """The value before the norm, from `x`, `residual`, params and buffers. The default is `x`, or `x + residual`."""
    output_mod: Expression = None
    """The output, from `y`, params and buffers. The default is `y`."""
    round_x_hat: bool = False
    """True if x_hat is rounded to the dtype of the input before the weight multiplies, as in Hugging Face's Llama."""
    statistics: Literal["save", "recompute"] = "save"
    """save: forward saves mean and rstd in fp32 for backward. recompute: backward computes them again."""
    quantize: Quantize | None = None
    """Quantization of the output to eight bits, forward only."""
    buffers: dict[Name, Buffer] = Field(default_factory=dict)
    """Tensors that the expressions may use, by name."""
    params: dict[Name, Param] = Field(default_factory=dict)
    """Scalars that the expressions may use, by name."""
    fast_math: bool = False
    """Allows cheaper approximations of functions such as tanh."""
    passes: Annotated[
        tuple[Literal["forward", "backward"], ...],
        Field(strict=False),
        BeforeValidator(checked_passes(PASSES)),
    ] = ("forward", "backward")
    """The kernels to emit: [forward] or [forward, backward]."""
    targets: Targets = Targets.model_validate({"triton": {}})
    """The targets to emit, with their options."""

    @property
    def accuracy(self) -> Accuracy:
        """The accuracy of functions."""
        if self.fast_math:
            return "fast"
        return "precise" if "fp32" in (self.dtypes["input"], self.dtypes["output"]) else "usual"

    @property
    def dtypes(self) -> Mapping[str, str]:
        """Dtypes of `input`, `weight`, `output` and `residual`, with the defaults."""
        given = {name: value or self.dtype.input for name, value in self.dtype}
        return given | ({"output": self.quantize.dtype} if self.quantize else {})

    @model_validator(mode="after")
    def _check(self) -> NormSpec:
        def refused(path: tuple[str, ...], message: str, hint: str) -> PydanticCustomError:
            return problem("bad-value", message, hint, at=path, key=True)

        if not self.weight:
            for field in ("weight_offset", "heads", "round_x_hat"):
                if field in self.model_fields_set and not (field == "heads" and self.bias):
                    raise refused((field,), f"`{field}` needs a weight", "remove it, or `weight: false`")
            if self.dtype.weight and not self.bias:
                raise refused(("dtype", "weight"), "there is no weight", "remove it, or `weight: false`")
        if self.dtype.residual and not self.residual:
            hint = "remove it, or add `residual: in_out`"
            raise refused(("dtype", "residual"), "there is no residual", hint)
        if self.quantize and self.dtype.output:
            hint = "remove it: `quantize` says the dtype of the output"
            raise refused(("dtype", "output"), "the output has two dtypes", hint)
        if self.quantize and "backward" in self.passes:
            message = "an output in eight bits has no gradient"
            raise refused(("quantize",), message, "add `passes: [forward]`")
        for name, buffer in self.buffers.items():
            if ("H" in buffer.shape, buffer.along) == (self.heads is None, "column"):
                fits = "[WIDTH]" if self.heads is None else "[H, WIDTH]"
                message = f"a column of this norm is {fits}, as the weight is"
                raise problem("bad-shape", message, f"write `shape: {fits}`", at=("buffers", name, "shape"))
        taken_names(self.name, {"buffers": self.buffers, "params": self.params})
        return self

    def expressions(self) -> Mapping[str, tuple[str, Scope, Type]]:
        """Return by field: the text, the names that it may use, and the type of its value."""
        shared = {n: b.element for n, b in self.buffers.items()}
        shared |= {n: p.scalar for n, p in self.params.items()}
        constants = compiled_in(self.params)
        inputs = {"x": Type.FLOAT} | ({"residual": Type.FLOAT} if self.residual else {})
        early = dict.fromkeys(inputs, "`output_mod` sees the normed value: use `x` in `input_mod`")
        late = {"y": "`input_mod` comes before the norm: use `y` in `output_mod`"}
        if not self.residual:
            late["residual"] = early["residual"] = "there is no residual: add `residual: in_out`"
        texts = (
            ("input_mod", self.input_mod, Scope(inputs | shared, {}, late, constants)),
            ("output_mod", self.output_mod, Scope({"y": Type.FLOAT} | shared, {}, early, constants)),
        )
        return {f: (text.written, scope, Type.FLOAT) for f, text, scope in texts if text is not None}

    def check(self, trees: Mapping[str, Node]) -> Iterator[PydanticCustomError]:
        """Yield the errors that need the typed `trees` (by field)."""
        used = {name for tree in trees.values() for name in variables(tree)}
        learned = {name for tree in trees.values() for name in differentiable(tree)}
        needed = {"input_mod": ("x", *(["residual"] if self.residual else [])), "output_mod": ("y",)}
        for field, tree in trees.items():
            for name in needed[field]:
                if name not in variables(tree):
                    hint = f"use `{name}`, or remove `{field}`"
                    yield problem("unused-name", f"`{field}` does not use `{name}`", hint, at=(field,))
        for name, buffer in self.buffers.items():
            at = ("buffers", name)
            if name not in used:
                hint = "use it in `input_mod` or `output_mod`, or remove it"
                message = f"no expression uses the buffer `{name}`"
                yield problem("unused-buffer", message, hint, at=at, key=True)
            elif buffer.grad and name not in learned:
                message = f"no expression is differentiable in `{name}`, so it has no gradient"
                hint = "remove `grad`, or let a value depend on it"
                yield problem("bad-grad", message, hint, at=(*at, "grad"), key=True)
            elif buffer.grad and "backward" not in self.passes:
                message = f"the gradient of `{name}` needs the backward pass"
                hint = "remove `grad`, or add `backward` to `passes`"
                yield problem("bad-grad", message, hint, at=(*at, "grad"), key=True)
        for name in self.params:
            if name not in used:
                hint = "use it in `input_mod` or `output_mod`, or remove it"
                yield problem(
                    "unused-param", f"no expression uses `{name}`", hint, at=("params", name), key=True
                )
