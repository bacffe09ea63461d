"""The schema of `kernel: norm`, a layer norm or RMS norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from kgen.diagnostics import did_you_mean, shown
from kgen.expr.nodes import Node, Type, variables
from kgen.expr.scope import Scope
from kgen.expr.spelling import Accuracy
from kgen.spec.adapters import adapters_field
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
"""Shapes that a buffer may have, and the axis along which its values vary."""
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
        *(
            "tensor",
            "dtype",
            "ctx",
            "outputs",
            "step",
            "shares",
            "save",
            "driver",
            "ctypes",
            "functools",
        ),
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
    """Dtypes of the tensors. Kernels compute in fp32."""

    input: Annotated[Real, Field(examples=["bf16"])]
    """Dtype of x."""
    weight: Real | None = None
    """Dtype of weight and bias; the default is the dtype of the input."""
    output: Real | None = None
    """Dtype of the output; the default is the dtype of the input."""
    residual: Real | None = None
    """Dtype of the residual, in and out; the default is the dtype of the input."""


def _dtypes(value: Any) -> Any:
    if isinstance(value, dict | Dtypes):
        return value
    if value in ("fp32", "bf16", "fp16"):
        return {"input": value}
    hint = did_you_mean(value, ("fp32", "bf16", "fp16")) if isinstance(value, str) else None
    message = f"`dtype` must be one of fp32, bf16, fp16 or a mapping, not {shown(value)}"
    raise problem(
        "bad-value", message, hint or "write `dtype: bf16` or `dtype: {input: bf16, weight: fp32}`"
    )


def _width(value: Any) -> Any:
    def fits(n: Any) -> bool:
        return is_integer(n) and 1 <= n <= MAX_WIDTH

    if value == "any" or fits(value):
        return value
    if isinstance(value, list | tuple) and value and all(map(fits, value)):
        if len(set(value)) == len(value):
            return tuple(value)
        raise problem("bad-value", "`width` lists a number twice", "write each width once")
    hint = "write `width: 4096`, `width: [64, 128]` or `width: any`"
    raise problem(
        "bad-value", f"a width is a number from 1 to {MAX_WIDTH}, not {shown(value)}", hint
    )


def _heads(value: Any) -> Any:
    if value is None or value == "any" or (is_integer(value) and 1 <= value < 2**16):
        return value
    hint = "write `heads: 32` or `heads: any`"
    raise problem(
        "bad-value", f"`heads` must be a number of at least 1, or `any`, not {shown(value)}", hint
    )


def _shape(value: Any) -> Any:
    if isinstance(value, list | tuple) and tuple(value) in SHAPES:
        return tuple(value)
    hint = "write `[ROWS, WIDTH]`, `[ROWS]` or `[WIDTH]` (with `heads`: `[H, WIDTH]`)"
    raise problem("bad-shape", f"{shown(value)} is not a shape of a buffer", hint)


class Buffer(SpecModel):
    """A tensor that the expressions use by its name, which stands for its value at each element."""

    shape: Annotated[
        tuple[Literal["ROWS", "WIDTH", "H"], ...],
        Field(strict=False, examples=[["ROWS", "WIDTH"]]),
        BeforeValidator(_shape),
    ]
    """[ROWS, WIDTH]: the shape of x. [ROWS]: without its last dimension. [WIDTH], [H, WIDTH]: the
    shape of weight.
    """
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16", "int32", "int64", "bool"], Field(examples=["bf16"])
    ]
    """Dtype of the elements in memory. Kernels compute in fp32 and int32."""
    grad: bool = False
    """True if the backward pass returns its gradient."""

    @property
    def element(self) -> Type:
        """The type of one element in expressions."""
        return ELEMENTS[self.dtype]

    @property
    def along(self) -> str:
        """The axis along which its values vary: `element`, `row` or `column`."""
        return SHAPES[self.shape]

    @model_validator(mode="after")
    def _check(self) -> Buffer:
        if self.grad and self.element is not Type.FLOAT:
            message, hint = (
                f"a buffer of {self.dtype} cannot have a gradient",
                "remove `grad`, or use a float dtype",
            )
            raise problem("bad-grad", message, hint, at=("grad",), key=True)
        return self


class Quantize(SpecModel):
    """The output in eight bits."""

    dtype: Literal["fp8_e4m3"]
    """Dtype of the output. Its largest number is 448, to which kernels clamp larger values."""
    scale: Literal["per_tensor", "per_row"]
    """Divisor of the output. `per_tensor`: the argument `scale`. `per_row`: the largest magnitude
    of the row / 448.

    The function returns the scales of `per_row`.
    """


if TYPE_CHECKING:
    from kgen.spec.targets import Targets

    Adapters = tuple[str, ...]
else:
    Targets = targets_model("norm", __name__)
    Adapters = adapters_field("norm")


# --- the spec ------------------------


class NormSpec(SpecModel):
    """One norm: output_mod(x_hat * (weight + weight_offset) + bias), x_hat the normed rows of
    input_mod(x).
    """

    kernel: Literal["norm"]
    """The family of kernels."""
    name: Annotated[Name, Field(examples=["rms_norm"])]
    """Name of the emitted function, in lower_snake_case."""
    summary: Summary = UserText("")
    """One line that describes the kernel. It begins the docstring of the emitted file."""
    license: License = UserText("Apache-2.0")
    """SPDX license identifier in the header of the emitted files."""
    norm: Annotated[Literal["layer", "rms"], Field(examples=["rms"])]
    """`layer`: (h - mean) / sqrt(var + eps). `rms`: h / sqrt(mean of squares + eps)."""
    width: Annotated[
        int | tuple[int, ...] | Literal["any"],
        BeforeValidator(
            _width,
            json_schema_input_type=Annotated[int, Field(ge=1, le=MAX_WIDTH)]
            | list[int]
            | Literal["any"],
        ),
        Field(examples=["any"]),
    ]
    """Elements of a row: a number or a list of numbers, which are compiled in, or `any`."""
    rows: Literal["any"] = "any"
    """Number of rows; each call determines it."""
    heads: Annotated[
        int | Literal["any"] | None,
        BeforeValidator(
            _heads, json_schema_input_type=Annotated[int, Field(ge=1)] | Literal["any"]
        ),
    ] = None
    """Number of heads H, or `any`. x is then [..., H, WIDTH], and weight and bias are [H,
    WIDTH].
    """
    dtype: Annotated[
        Dtypes,
        BeforeValidator(_dtypes, json_schema_input_type=Real | Dtypes),
        Field(examples=["bf16"]),
    ]
    """Dtype of all tensors, or {input, weight, output, residual}."""
    weight: bool = True
    """True if the function has the argument `weight`."""
    weight_offset: Annotated[int, Field(ge=0, le=1)] = 0
    """A number that is added to the weight: 1 for weights that are stored around zero, as in
    Gemma.
    """
    bias: bool = False
    """True if the function has the argument `bias`."""
    eps: Annotated[float, Field(ge=0, le=1, strict=False)] = 1e-6
    """The default of the argument `eps`, which is added to the variance (layer) or mean of squares
    (rms).
    """
    # The sum is rounded before the norm, so backward reads only the returned sum.
    residual: Literal["in", "in_out"] | None = None
    """`in`: the argument `residual` is added to x. `in_out`: the function also returns the sum.

    With `in_out`, the sum is rounded to the dtype of the residual before the norm."""
    input_mod: Expression = None
    """The value to normalize, from `x`, `residual`, params and buffers.

    The default is `x`, or `x + residual` with a residual."""
    output_mod: Expression = None
    """The output, from `y`, params and buffers; the default is `y`."""
    round_x_hat: bool = False
    """True to round x_hat to the dtype of the input before the weight multiplies it, as in Hugging
    Face's Llama.
    """
    statistics: Literal["save", "recompute"] = "save"
    """`save`: forward stores mean and rstd in fp32 for backward. `recompute`: backward computes
    them again.
    """
    quantize: Quantize | None = None
    """Quantization of the output to eight bits, only without the backward pass."""
    buffers: dict[Name, Buffer] = Field(default_factory=dict)
    """Tensors that the expressions use, by name."""
    params: dict[Name, Param] = Field(default_factory=dict)
    """Scalars that the expressions use, by name."""
    fast_math: bool = False
    """True to allow cheaper approximations of functions such as tanh."""
    passes: Annotated[
        tuple[Literal["forward", "backward"], ...],
        Field(strict=False),
        BeforeValidator(checked_passes(PASSES)),
    ] = ("forward", "backward")
    """Kernels to emit: [forward] or [forward, backward]."""
    targets: Targets = Targets.model_validate({"triton": {}})
    """Languages of the emitted kernels, each with its options."""
    adapters: Adapters = ()
    """Programs that call the kernels. `kgen render` writes a package for each, as `kgen adapt`
    does.
    """

    @property
    def accuracy(self) -> Accuracy:
        """The accuracy of functions."""
        if self.fast_math:
            return "fast"
        return "precise" if "fp32" in (self.dtypes["input"], self.dtypes["output"]) else "usual"

    @property
    def dtypes(self) -> Mapping[str, str]:
        """Dtypes of `input`, `weight`, `output` and `residual`, with defaults filled in."""
        given = {name: value or self.dtype.input for name, value in self.dtype}
        return given | ({"output": self.quantize.dtype} if self.quantize else {})

    @model_validator(mode="after")
    def _check(self) -> NormSpec:
        def refused(path: tuple[str, ...], message: str, hint: str) -> PydanticCustomError:
            return problem("bad-value", message, hint, at=path, key=True)

        if not self.weight:
            for field in ("weight_offset", "heads", "round_x_hat"):
                if field in self.model_fields_set and not (field == "heads" and self.bias):
                    raise refused(
                        (field,), f"`{field}` needs a weight", "remove it, or `weight: false`"
                    )
            if self.dtype.weight and not self.bias:
                raise refused(
                    ("dtype", "weight"),
                    "`dtype.weight` needs a weight or a bias",
                    "remove it, or `weight: false`",
                )
        if self.dtype.residual and not self.residual:
            hint = "remove it, or add `residual: in_out`"
            raise refused(("dtype", "residual"), "`dtype.residual` needs a residual", hint)
        if self.quantize and self.dtype.output:
            hint = "remove it: `quantize` determines the dtype of the output"
            raise refused(
                ("dtype", "output"), "`dtype.output` and `quantize.dtype` exclude each other", hint
            )
        if self.quantize and "backward" in self.passes:
            message = "a quantized output has no gradient"
            raise refused(("quantize",), message, "add `passes: [forward]`")
        for name, buffer in self.buffers.items():
            if ("H" in buffer.shape, buffer.along) == (self.heads is None, "column"):
                fits = "[WIDTH]" if self.heads is None else "[H, WIDTH]"
                message = f"a buffer along columns must have the shape of the weight, {fits}"
                raise problem(
                    "bad-shape", message, f"write `shape: {fits}`", at=("buffers", name, "shape")
                )
        taken_names(self.name, {"buffers": self.buffers, "params": self.params})
        return self

    def expressions(self) -> Mapping[str, tuple[str, Scope, Type]]:
        """Return by field: the text, the names that it may use, and the type that its value must
        have.
        """
        shared = {n: b.element for n, b in self.buffers.items()}
        shared |= {n: p.scalar for n, p in self.params.items()}
        constants = compiled_in(self.params)
        inputs = {"x": Type.FLOAT} | ({"residual": Type.FLOAT} if self.residual else {})
        early = dict.fromkeys(
            inputs, "`output_mod` reads the normalized value `y`: use `x` in `input_mod`"
        )
        late = {"y": "`input_mod` is computed before the norm: use `y` in `output_mod`"}
        if not self.residual:
            late["residual"] = early["residual"] = "there is no residual: add `residual: in_out`"
        texts = (
            ("input_mod", self.input_mod, Scope(inputs | shared, {}, late, constants)),
            (
                "output_mod",
                self.output_mod,
                Scope({"y": Type.FLOAT} | shared, {}, early, constants),
            ),
        )
        return {
            f: (text.written, scope, Type.FLOAT) for f, text, scope in texts if text is not None
        }

    def check(self, trees: Mapping[str, Node]) -> Iterator[PydanticCustomError]:
        """Yield the errors that only the typed `trees` (by field) show."""
        used = {name for tree in trees.values() for name in variables(tree)}
        learned = {name for tree in trees.values() for name in differentiable(tree)}
        needed = {
            "input_mod": ("x", *(["residual"] if self.residual else [])),
            "output_mod": ("y",),
        }
        for field, tree in trees.items():
            for name in needed[field]:
                if name not in variables(tree):
                    hint = f"use `{name}`, or remove `{field}`"
                    yield problem(
                        "unused-name", f"`{field}` does not use `{name}`", hint, at=(field,)
                    )
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
                    "unused-param",
                    f"no expression uses `{name}`",
                    hint,
                    at=("params", name),
                    key=True,
                )
