"""The schema of `kernel: chunk_output`, the output step of chunked linear attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from kgen.diagnostics import shown
from kgen.expr.nodes import Node, Read, Type, Var, reads
from kgen.expr.scope import BufferType, Scope
from kgen.spec.common import (
    Expression,
    License,
    Summary,
    checked_name,
    checked_passes,
    is_integer,
    refuse,
)
from kgen.spec.problems import SpecModel, problem
from kgen.spec.targets import targets_model
from kgen.spec.user_text import UserText

SIZES = ("H", "HV")
INDICES = ("i", "h")
GATES = {"g": "i", "g_gamma": "h"}
"""The tensors that `decay` may read, each with its only index."""
RESERVED = frozenset(
    {
        *(
            *SIZES,
            *INDICES,
            *GATES,
            "inf",
            "q",
            "k",
            "v",
            "o",
            "scale",
            "cu_seqlens",
            "chunk_indices",
        ),
        *("math", "torch", "triton", "tl"),
        # Files of the emitted package: importing one would hide a function of this name.
        *("cute_sm90", "cute_sm100"),
    }
)
PASSES = ("forward", "backward")
CUTE_WIDTHS, CUTE_CHUNK = (64, 128), 64
"""Head dims and chunk size of the CuTe DSL kernels."""

Name = Annotated[str, AfterValidator(checked_name), AfterValidator(refuse(RESERVED))]
Width = Annotated[Literal[64, 128, 256], Field(examples=[128])]
Count = Annotated[int, Field(ge=1, le=65535, examples=[32])]

# --- parts ------------------------


class HeadDim(SpecModel):
    """Elements per head: 64, 128 or 256."""

    qk: Width
    """Elements of a query and of a key: K."""
    v: Width
    """Elements of a value and of an output row: V."""


def _head_dim(value: Any) -> Any:
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


def _heads(value: Any) -> Any:
    if value == "any":
        return {}
    if isinstance(value, dict | Heads):
        return value
    hint = "write `any`, `{group: 2}` or `{qk: 16, v: 32}`"
    raise problem("wrong-type", f"`heads` must be `any` or a mapping, not {shown(value)}", hint)


if TYPE_CHECKING:
    from kgen.spec.targets import Targets
else:
    Targets = targets_model("chunk_output", __name__)


# --- the spec ------------------------


class ChunkOutputSpec(SpecModel):
    """The output step of chunked linear attention, from the chunk and the state before it.

    A chunk has BT tokens. With c(i) the value of `decay` at position i and b the base of the gate:

        o[i] = scale * (b**c(i) * q[i] @ state  +  sum over j <= i of b**(c(i) - c(j)) * (q[i] . k[j]) * v[j])
    """  # noqa: E501

    kernel: Literal["chunk_output"]
    """The family of kernels."""
    name: Annotated[Name, Field(examples=["gated_delta_output"])]
    """Name of the emitted function, in lower_snake_case."""
    summary: Summary = UserText("")
    """One line that describes the kernel. It begins the docstring of the emitted file."""
    license: License = UserText("Apache-2.0")
    """SPDX license identifier in the header of the emitted files."""
    dtype: Annotated[Literal["bf16", "fp16"], Field(examples=["bf16"])]
    """Dtype of q, k, v and the output. Sums are fp32."""
    state_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """Dtype of the states; the default is the dtype of q. The kernels multiply in the dtype of
    q.
    """
    gate_dtype: Literal["bf16", "fp16", "fp32"] = "fp32"
    """Dtype of g and g_gamma."""
    head_dim: Annotated[
        HeadDim,
        BeforeValidator(_head_dim, json_schema_input_type=Width | HeadDim),
        Field(examples=[128]),
    ]
    """Elements per head, 64, 128 or 256: one number, or {qk, v}."""
    chunk_size: Literal[16, 32, 64, 128] = 64
    """Tokens per chunk: BT."""
    heads: Annotated[
        Heads, BeforeValidator(_heads, json_schema_input_type=Literal["any"] | Heads)
    ] = Heads()
    """Numbers of heads: {qk: 16, v: 32} compiles both in, {group: 2} only their ratio, `any`
    nothing.
    """
    # The state decays by b**c(i), a pair of positions by b**(c(i) - c(j)). The difference alone
    # does not determine c(i), and a subtraction before the power cannot overflow.
    decay: Expression = None
    """The exponent c(i) of the decay from the start of the chunk to position i. Without it, there
    is no decay.
    """
    gate_base: Literal["e", 2] = "e"
    """The base of the decay: e, or 2."""
    state_layout: Literal["kv", "vk"] = "kv"
    """Order of the dimensions of a state in memory: [K, V] or [V, K]."""
    v_layout: Literal["token", "chunk_padded"] = "token"
    """Shape of v: `token` is [B, T, HV, V]; `chunk_padded` is [B, NT * BT, HV, V], padded to whole
    chunks.
    """
    varlen: bool = False
    """True if sequences are packed end to end in one row; `cu_seqlens` holds their offsets."""
    passes: Annotated[
        tuple[Literal["forward", "backward"], ...],
        Field(strict=False),
        BeforeValidator(checked_passes(PASSES)),
    ] = ("forward", "backward")
    """Kernels to emit: [forward] or [forward, backward]."""
    targets: Targets = Targets.model_validate({"triton": {}})
    """Languages of the emitted kernels, each with its options."""

    @property
    def state(self) -> str:
        """The dtype of the states."""
        return self.state_dtype or self.dtype

    def expressions(self) -> Mapping[str, tuple[str, Scope, Type]]:
        """Return by field: the text, the names that it may use, and the type that its value must
        have.
        """
        if self.decay is None:
            return {}
        scope = Scope(
            dict.fromkeys((*INDICES, *SIZES), Type.INT),
            {name: BufferType(Type.FLOAT, 1) for name in GATES},
            {
                "j": (
                    "`decay` is the exponent c(i) at one position `i`; the kernel computes "
                    "c(i) - c(j)"
                )
            },
            {size: heads for size, heads in (("H", self.heads.qk), ("HV", self.heads.v)) if heads},
        )
        return {"decay": (self.decay.written, scope, Type.FLOAT)}

    def check(self, trees: Mapping[str, Node]) -> Iterator[PydanticCustomError]:
        """Yield the errors that only the typed `trees` (by field) show."""
        read = reads(trees["decay"]) if "decay" in trees else ()
        for one in read:
            index = Var(GATES[one.buffer], Type.INT)
            if one != Read(one.buffer, (index,), Type.FLOAT):
                message = f"`{one.buffer}` must be read at index `{index.name}`"
                yield problem(
                    "bad-index", message, f"write `{one.buffer}[{index.name}]`", at=("decay",)
                )
        if "gate_dtype" in self.model_fields_set and not read:
            hint = "remove it, or read `g[i]` in `decay`"
            yield problem(
                "unused-gate",
                "`gate_dtype` needs a `decay` that reads a gate",
                hint,
                at=("gate_dtype",),
                key=True,
            )
        if "gate_base" in self.model_fields_set and "decay" not in trees:
            hint = "remove it, or write `decay: g[i]`"
            yield problem(
                "unused-gate", "`gate_base` needs a `decay`", hint, at=("gate_base",), key=True
            )
        if self.targets.cute:
            yield from self._beyond_cute()

    def _beyond_cute(self) -> Iterator[PydanticCustomError]:
        """Yield an error if the CuTe DSL kernels do not support the spec."""
        assert self.targets.cute is not None
        arch, widths = self.targets.cute.arch, " or ".join(map(str, CUTE_WIDTHS))
        needs = {
            "at least one architecture, each once": 0 < len(arch) == len(set(arch)),
            f"`head_dim` of {widths}": self.head_dim.qk in CUTE_WIDTHS
            and self.head_dim.v in CUTE_WIDTHS,
            f"`chunk_size: {CUTE_CHUNK}`": self.chunk_size == CUTE_CHUNK,
            "states in the dtype of q": self.state == self.dtype,
            "the target `triton` for the backward pass": "backward" not in self.passes
            or self.targets.triton,
        }
        if missing := [need for need, met in needs.items() if not met]:
            message = f"the target `cute` needs {', '.join(missing)}"
            hint = "remove the target, or change the spec; the target `triton` supports all"
            yield problem("unsupported-target", message, hint, at=("targets", "cute"), key=True)
