"""Widths and numbers of heads in specs of linear attention: H heads of q and k, HV of values."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from kgen.diagnostics import shown
from kgen.spec.common import is_integer
from kgen.spec.problems import SpecModel, problem

Width = Annotated[Literal[64, 128, 256], Field(examples=[128])]
Count = Annotated[int, Field(ge=1, le=65535, examples=[32])]


class HeadDim(SpecModel):
    """Elements per head: 64, 128 or 256."""

    qk: Width
    """Elements of a query and of a key: K."""
    v: Width
    """Elements of a value and of an output row: V."""


def checked_head_dim(value: Any) -> Any:
    """Return the mapping of head widths: a number stands for both. Raise for other values."""
    if is_integer(value):
        return {"qk": value, "v": value}
    if isinstance(value, dict | HeadDim):
        return value
    hint = "write `head_dim: 128` or `head_dim: {qk: 128, v: 256}`"
    raise problem(
        "wrong-type", f"`head_dim` must be an integer or a mapping, not {shown(value)}", hint
    )


class Heads(SpecModel):
    """Numbers of heads that are compiled in: both numbers, only their ratio, or none."""

    qk: Count | None = None
    """Heads of q and k: H."""
    v: Count | None = None
    """Heads of v, the states, the gate and the output: HV, a multiple of H."""
    group: Count | None = None
    """HV / H, if the tensors of each call determine the numbers."""

    @property
    def ratio(self) -> int | None:
        """Value heads per head of q and k, or None if the spec leaves it open."""
        return self.v // self.qk if self.v and self.qk else self.group

    @model_validator(mode="after")
    def _check(self) -> Heads:
        if (self.qk is None) != (self.v is None) or (
            self.qk is not None and self.group is not None
        ):
            hint = "write `{qk: 16, v: 32}`, `{group: 2}` or `any`"
            raise problem("bad-value", "`heads` needs both `qk` and `v`, or only `group`", hint)
        if self.qk and self.v and self.v % self.qk:
            message = f"`v` must be a multiple of `qk`: {self.v} is not a multiple of {self.qk}"
            raise problem("bad-value", message, f"write `v: {self.qk}`, for example", at=("v",))
        return self


def checked_heads(value: Any) -> Any:
    """Return the mapping of numbers of heads: `any` leaves them open. Raise for other values."""
    if value == "any":
        return {}
    if isinstance(value, dict | Heads):
        return value
    hint = "write `any`, `{group: 2}` or `{qk: 16, v: 32}`"
    raise problem("wrong-type", f"`heads` must be `any` or a mapping, not {shown(value)}", hint)
