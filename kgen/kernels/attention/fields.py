"""Fields of an attention spec with their checks, and the fields that a dump omits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from kgen.diagnostics import shown
from kgen.spec.common import ParamSpec, is_integer, number_or_param
from kgen.spec.problems import SpecModel, all_known, problem

PASSES = ("forward", "backward", "decode", "serve")
MOST = 2**30
"""Largest magnitude of integers that kernels add to positions."""


def without_serving(passes: Sequence[str]) -> tuple[str, ...]:
    """Return the passes of a spec that is derived from a spec with these passes."""
    return tuple(name for name in passes if name != "serve")


def checked_gqa(value: Any) -> Any:
    """Return a valid number of query heads per key-value head, or raise a problem."""
    if value == "any" or (is_integer(value) and 1 <= value < 2**31):
        return value
    hint = "write the number of query heads per key-value head, for example `gqa: 4`"
    raise problem(
        "bad-value", f"`gqa` must be an integer of at least 1, or `any`, not {shown(value)}", hint
    )


def passes_in_order(value: Any) -> Any:
    """Return the passes if each is there once and they are in order, or raise a problem."""
    if not isinstance(value, list | tuple):
        return value
    all_known(value, PASSES, "unknown-pass", "pass")
    if not {"forward", "decode", "serve"} & set(value):
        hint = "write `passes: [forward, backward]`"
        raise problem("missing-pass", "`passes` needs `forward` or `decode`", hint)
    if "serve" in value and "forward" not in value:
        hint = "write `passes: [forward, serve]`"
        raise problem("missing-pass", "`serve` needs `forward`", hint)
    if "backward" in value and "forward" not in value:
        raise problem(
            "missing-pass",
            "`backward` needs `forward`",
            "write `passes: [forward, backward, decode]`",
        )
    if list(value) != [name for name in PASSES if name in value]:
        hint = f"write `[{', '.join(name for name in PASSES if name in value)}]`"
        raise problem("bad-value", "`passes` must list each pass once, forward first", hint)
    return value


class AttentionParam(ParamSpec):
    """A scalar that expressions use by name: a compile-time constant, or an argument of every
    call.
    """

    within: Annotated[int, Field(ge=2**17, le=MOST, examples=[2**27])] | None = None
    """Largest magnitude of a run-time integer. Calls check it, and `kgen prove` uses it. Default:
    2**30.
    """

    @model_validator(mode="after")
    def _bounded(self) -> AttentionParam:
        if self.within is not None and (self.type != "int" or not self.runtime):
            found = "a real number" if self.type == "float" else "a compile-time constant"
            message = f"`within` bounds run-time integers, and the parameter is {found}"
            raise problem("bad-within", message, "remove `within`", at=("within",), key=True)
        return self

    @property
    def most(self) -> int:
        """Largest magnitude of a run-time integer. Tile ranges add it to positions in 32 bits."""
        return self.within or MOST

    @property
    def most_spelled(self) -> str:
        """The same as an expression of Python: a power of two is easier to read than its digits."""
        return f"2**{self.most.bit_length() - 1}" if self.most.bit_count() == 1 else str(self.most)


Param = Annotated[
    AttentionParam,
    BeforeValidator(number_or_param, json_schema_input_type=int | float | AttentionParam),
]


def bounded(dtype: str, within: int | None) -> None:
    """Raise a problem if `within` is set for a dtype other than int32 and int64."""
    if within is not None and dtype not in ("int32", "int64"):
        message = f"`within` needs a buffer of int32 or int64, not {dtype}"
        raise problem(
            "bad-within", message, "remove `within`, or use int32", at=("within",), key=True
        )


def without_defaults(dumped: dict[str, Any]) -> dict[str, Any]:
    """Return a dump without fields that were added later and have their defaults.

    So hashes of specs stay the same when a field is added.
    """
    added = {"block_mask": "auto", "backward_in_parts": False, "row_max": False}
    for field, default in (added | {"kv_dtype": None, "deterministic": None}).items():
        if dumped.get(field) == default:
            del dumped[field]
    for buffer in (dumped.get("buffers") or {}).values():
        if buffer.get("within") is None:
            buffer.pop("within", None)
    for param in (dumped.get("params") or {}).values():
        if param.get("within") is None:
            param.pop("within", None)
    return dumped


class HeadDim(SpecModel):
    """Elements per head: any numbers, also other than powers of two."""

    qk: Annotated[int, Field(ge=1, le=1024, examples=[192])]
    """Elements of a query and of a key."""
    v: Annotated[int, Field(ge=1, le=1024, examples=[128])]
    """Elements of a value and of an output row."""


def checked_head_dim(value: Any) -> Any:
    """Return `head_dim` as a mapping, or raise a problem."""
    if isinstance(value, dict | HeadDim):
        return value
    if not is_integer(value):
        hint = "write `head_dim: 128` or `head_dim: {qk: 192, v: 128}`"
        raise problem(
            "wrong-type", f"`head_dim` must be an integer or a mapping, not {shown(value)}", hint
        )
    return {"qk": value, "v": value}


class Length(SpecModel):
    """A promise about one sequence length: it is a multiple of `multiple_of`."""

    multiple_of: Annotated[int, Field(ge=1, le=2**20, examples=[128])]
    """Every length is a multiple of it, so the kernels omit bounds checks. 1 promises nothing."""


def checked_length(value: Any) -> Any:
    """Return a promise about a length as a mapping, or raise a problem."""
    if value == "any":
        return {"multiple_of": 1}
    if isinstance(value, dict | Length):
        return value
    hint = "write `any` or `{multiple_of: 128}`"
    raise problem("wrong-type", f"a length must be `any` or a mapping, not {shown(value)}", hint)


class KeyLength(Length):
    """Promises about the number of keys."""

    multiple_of: Annotated[int, Field(ge=1, le=2**20, examples=[128])] = 1
    """Every length is a multiple of it, so the kernels omit bounds checks. 1 promises nothing."""
    per_batch: bool = False
    """True if the argument `kv_lens` [B] int32 holds the number of keys of each sequence, at most
    SK.

    Kernels do not read keys beyond it.
    """


class Lengths(SpecModel):
    """Promises about the lengths of the sequences."""

    q: Annotated[
        Length, BeforeValidator(checked_length, json_schema_input_type=Literal["any"] | Length)
    ] = Length(multiple_of=1)
    """The number of queries: `any`, or {multiple_of: 128}."""
    kv: Annotated[
        KeyLength,
        BeforeValidator(checked_length, json_schema_input_type=Literal["any"] | KeyLength),
    ] = KeyLength()
    """The number of keys and values: `any`, or {multiple_of: 128, per_batch: true}."""


class PagedKV(SpecModel):
    """Keys and values in a pool of pages, [pages, page_size, HKV, D].

    `block_table` [B, n] int32 lists the pages of each sequence, in order.
    """

    page_size: Annotated[int, Field(ge=1, le=2**20, examples=[64])]
    """Positions per page, a power of two."""

    @model_validator(mode="after")
    def _check(self) -> PagedKV:
        if self.page_size & (self.page_size - 1):
            message = f"`page_size` must be a power of two, not {self.page_size}"
            raise problem("bad-value", message, "use 16, 64 or 256, for example", at=("page_size",))
        return self
