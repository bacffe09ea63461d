"""Fields of a linear_attention spec that are mappings: head sizes, numbers of heads, buffers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from kgen.diagnostics import shown
from kgen.expr.nodes import Type
from kgen.spec.common import (
    ELEMENTS,
    Expression,
    checked_name,
    checked_own_name,
    is_integer,
    refuse,
)
from kgen.spec.problems import SpecModel, problem

SIZES = ("H", "HV")
INDEX_OF = {"T": "t", "HV": "h", "K": "c", "V": "c"}
"""The index of each dimension of a buffer: token, value head, and column of keys or of values."""
SHAPES = (
    ("V",),
    ("HV",),
    ("HV", "K"),
    ("HV", "V"),
    ("T", "HV"),
    ("T", "HV", "K"),
    ("T", "HV", "V"),
)
RESERVED = frozenset(
    {
        *(*SIZES, "B", "T", "K", "V", "t", "h", "c", "x", "inf"),
        *("q", "k", "v", "o", "state", "states", "scale"),
        *("initial_state", "final_state", "output_final_state", "return_states"),
        *("cu_seqlens", "device", "math", "torch", "triton", "tl"),
    }
)

Name = Annotated[str, AfterValidator(checked_name), AfterValidator(refuse(RESERVED))]
OwnName = Annotated[str, AfterValidator(checked_own_name), AfterValidator(refuse(RESERVED))]
Width = Annotated[Literal[64, 128, 256], Field(examples=[128])]
Count = Annotated[int, Field(ge=1, le=65535, examples=[32])]


class HeadDim(SpecModel):
    """Elements per head, 64, 128 or 256."""

    qk: Width
    """Elements of a query and of a key, K: rows of a state."""
    v: Width
    """Elements of a value and of an output row, V: columns of a state."""


def checked_head_dim(value: Any) -> Any:
    """Return the mapping of head widths: a number stands for both. Raise for other values."""
    if is_integer(value):
        return {"qk": value, "v": value}
    if isinstance(value, dict | HeadDim):
        return value
    message = f"`head_dim` must be an integer or a mapping, not {shown(value)}"
    raise problem("wrong-type", message, "write `head_dim: 128` or `head_dim: {qk: 128, v: 64}`")


class Heads(SpecModel):
    """Numbers of heads that are compiled into kernels: both numbers, only their ratio, or none."""

    qk: Count | None = None
    """Heads of q and k: H."""
    v: Count | None = None
    """Heads of v, the states, the output and the buffers: HV, a multiple of H."""
    group: Count | None = None
    """HV / H, if the tensors of each call determine the numbers."""

    @property
    def ratio(self) -> int | None:
        """Value heads per head of q and k, or None if the spec leaves it open."""
        return self.v // self.qk if self.v and self.qk else self.group

    @model_validator(mode="after")
    def _check(self) -> Heads:
        given = (self.qk is not None, self.v is not None, self.group is not None)
        if given not in ((True, True, False), (False, False, True), (False, False, False)):
            hint = "write `{qk: 16, v: 32}`, `{group: 2}` or `any`"
            raise problem("bad-value", "`heads` needs both `qk` and `v`, or only `group`", hint)
        if self.qk and self.v and self.v % self.qk:
            message = f"`v` must be a multiple of `qk`: {self.v} is not a multiple of {self.qk}"
            raise problem("bad-value", message, f"write `v: {self.qk}`, for example", at=("v",))
        return self


def checked_heads(value: Any) -> Any:
    """Return the mapping of numbers of heads: `any` leaves them open. Raise for other values."""
    if isinstance(value, dict | Heads):
        return value
    if value == "any":
        return {}
    message = f"`heads` must be `any` or a mapping, not {shown(value)}"
    raise problem("wrong-type", message, "write `any`, `{group: 2}` or `{qk: 16, v: 32}`")


def _shape(value: Any) -> Any:
    if isinstance(value, list | tuple) and tuple(value) in SHAPES:
        return tuple(value)
    listed = ", ".join(f"[{', '.join(shape)}]" for shape in SHAPES)
    hint = f"use one of {listed}; T stands for the batch and the tokens"
    raise problem("bad-shape", f"{shown(value)} is not a shape of a buffer", hint)


class Buffer(SpecModel):
    """A tensor that the expressions index: `g[t, h]`."""

    shape: Annotated[
        tuple[Literal["T", "HV", "K", "V"], ...],
        Field(strict=False, examples=[["T", "HV"]]),
        BeforeValidator(_shape),
    ]
    """[V], [HV], [HV, K], [HV, V], [T, HV], [T, HV, K] or [T, HV, V].

    The tensor of a call has the batch in front of T: [T, HV] is [B, T, HV].
    """
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], Field(examples=["fp32"])]
    """Dtype of the elements in memory. Kernels compute in fp32."""
    grad: bool = False
    """True if the backward pass returns its gradient."""

    @property
    def element(self) -> Type:
        """The type of one element in expressions."""
        return ELEMENTS[self.dtype]

    @property
    def indices(self) -> tuple[str, ...]:
        """The only indices at which expressions may read it."""
        return tuple(INDEX_OF[size] for size in self.shape)

    @property
    def tokens(self) -> bool:
        """True if it has an element for each token."""
        return self.shape[0] == "T"

    @property
    def columns(self) -> str | None:
        """`K` or `V` if its last dimension is along columns, else None."""
        return self.shape[-1] if self.shape[-1] in ("K", "V") else None


def _elementwise(value: Any) -> Any:
    if isinstance(value, str) and "l2norm(" in value.replace(" ", ""):
        message = "a feature map is elementwise, and `l2norm` reads all columns of a row"
        hint = "write `qk_norm: l2`, which follows the feature maps"
        raise problem("not-elementwise", message, hint)
    return value


FeatureMap = Annotated[Expression, BeforeValidator(_elementwise)]
