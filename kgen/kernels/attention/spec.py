"""The schema of `kernel: attention`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from kgen.diagnostics import did_you_mean, shown
from kgen.expr.canonical import canonical
from kgen.expr.mask_form import FALSE
from kgen.expr.nodes import Call, Const, Node, Type, Var, buffers_of, reads, variables
from kgen.expr.scope import BufferType, Scope
from kgen.expr.spelling import Accuracy
from kgen.kernels.attention.fields import (
    HeadDim,
    Lengths,
    PagedKV,
    Param,
    bounded,
    checked_gqa,
    checked_head_dim,
    passes_in_order,
    without_defaults,
)
from kgen.kernels.attention.serving import SERVE_ARGUMENTS, check_serving, refuse_lengths
from kgen.spec.adapters import adapters_field
from kgen.spec.common import (
    ELEMENTS,
    MAX_RANK,
    REALS,
    Expression,
    License,
    Summary,
    checked_name,
    checked_own_name,
    compiled_in,
    differentiable,
    is_integer,
    numbers,
    refuse,
    taken_names,
)
from kgen.spec.problems import SpecModel, problem
from kgen.spec.targets import targets_model
from kgen.spec.user_text import UserText

KV_LENS = "kv_lens"
"""The argument that holds the number of keys of each sequence."""
SIZES = ("B", "HQ", "HKV", "SQ", "SK")
ANY = "any"
"""An extent that each call's tensor determines. As a dtype: one of `REALS`, which the tensor
determines.
"""
MEANINGS = ("h_kv",)
INDICES = ("b", "h", "q_idx", "kv_idx")
RESERVED = frozenset(
    {
        *SIZES,
        *INDICES,
        *MEANINGS,
        "score",
        "inf",
        "q",
        "k",
        "v",
        "out",
        "lse",
        "scale",
        "return_lse",
        "block_mask",
        "kv_num_blocks",
        "full_kv_num_blocks",
        "kv_indices",
        "q_num_blocks",
        "full_q_num_blocks",
        "q_indices",
        "device",
        "math",
        "torch",
        "triton",
        "tl",
    }
)
PASSES = ("forward", "backward", "decode", "serve")

Name = Annotated[str, AfterValidator(checked_name), AfterValidator(refuse(RESERVED))]
OwnName = Annotated[str, AfterValidator(checked_own_name), AfterValidator(refuse(RESERVED))]

# --- parts ------------------------


def _extent(value: Any) -> Any:
    if value in (*SIZES, ANY) or (is_integer(value) and 1 <= value < 2**31):
        return value
    hint = did_you_mean(value.upper(), SIZES) if isinstance(value, str) else None
    hint = hint or f"use a positive integer, one of {', '.join(SIZES)}, or `{ANY}`"
    raise problem("bad-shape", f"{shown(value)} is not a size", hint)


_Named = Literal["B", "HQ", "HKV", "SQ", "SK", "any"]
Extent = Annotated[
    int | _Named,
    BeforeValidator(_extent, json_schema_input_type=Annotated[int, Field(ge=1)] | _Named),
]


class Buffer(SpecModel):
    """A tensor that the expressions read. An index out of bounds reads zero."""

    shape: Annotated[
        tuple[Extent, ...], Field(strict=False, max_length=MAX_RANK, examples=[["HQ"]])
    ]
    """Extents: integers, sizes, or `any`, which each call's tensor determines. [] for one number,
    used by its name.

    The sizes are B (batch), HQ (query heads), HKV (key-value heads), SQ (queries) and SK (keys).
    """
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16", "int32", "int64", "uint8", "bool", "any"],
        Field(examples=["fp32"]),
    ]
    """Dtype of the elements in memory. Kernels compute in fp32 and int32.

    With `any`, the tensor of each call has fp32, bf16 or fp16."""
    grad: bool = False
    """True if the backward pass returns its gradient."""
    sorted: bool = False
    """A promise that each row (the last axis) ascends. Kernels then skip tiles if the mask compares
    its elements.
    """
    within: Annotated[int, Field(ge=1, le=2**30, examples=[2**29])] | None = None
    """A promise about an integer buffer: each element is between -within and within.

    `kgen prove` uses it to show that sums fit 32 bits."""

    @property
    def element(self) -> Type:
        """The type of one element in expressions."""
        return ELEMENTS[self.dtypes[0]]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that the tensor of a call may have."""
        return REALS if self.dtype == ANY else (self.dtype,)

    @property
    def dtype_words(self) -> str:
        """The dtypes as text, for messages."""
        *first, last = self.dtypes
        return f"{', '.join(first)} or {last}" if first else last

    @model_validator(mode="after")
    def _check(self) -> Buffer:
        if self.grad and self.element is not Type.FLOAT:
            message = f"a buffer of {self.dtype} cannot have a gradient"
            raise problem(
                "bad-grad",
                message,
                "remove `grad`, or use a floating-point dtype",
                at=("grad",),
                key=True,
            )
        if self.sorted and not self.shape:
            message = "a buffer without dimensions cannot be sorted"
            raise problem("bad-sorted", message, "remove `sorted`", at=("sorted",), key=True)
        if self.sorted and self.dtype not in ("int32", "int64"):
            message = f"`sorted` needs a buffer of int32 or int64, not {self.dtype}"
            raise problem(
                "bad-sorted", message, "remove `sorted`, or use int32", at=("sorted",), key=True
            )
        bounded(self.dtype, self.within)
        return self


if TYPE_CHECKING:
    from kgen.spec.targets import Targets

    Adapters = tuple[str, ...]
else:
    Targets = targets_model("attention", __name__)
    Adapters = adapters_field("attention")


# --- the spec ------------------------


class AttentionSpec(SpecModel):
    """One attention variant: softmax(score_mod(scale * q @ k^T) where mask_mod) @ v."""

    kernel: Literal["attention"]
    """The family of kernels."""
    name: Annotated[Name, Field(examples=["causal_alibi"])]
    """Name of the emitted function, in lower_snake_case."""
    summary: Summary = UserText("")
    """One line that describes the kernel. It begins the docstring of the emitted file."""
    license: License = UserText("Apache-2.0")
    """SPDX license identifier in the header of the emitted files."""
    dtype: Annotated[Literal["bf16", "fp16", "fp32"], Field(examples=["bf16"])]
    """Dtype of q, k, v and the output. Sums and softmax are fp32."""
    precision: Literal["ieee", "tf32", "tf32x3"] = "ieee"
    """Precision of the matrix products, only with `dtype: fp32`."""
    head_dim: Annotated[
        HeadDim,
        BeforeValidator(
            checked_head_dim, json_schema_input_type=Annotated[int, Field(ge=1, le=1024)] | HeadDim
        ),
        Field(examples=[128]),
    ]
    """Elements per head: one number, or {qk, v}."""
    gqa: Annotated[
        int | Literal["any"],
        BeforeValidator(
            checked_gqa, json_schema_input_type=Annotated[int, Field(ge=1)] | Literal["any"]
        ),
    ] = 1
    """Query heads per key-value head. With `any`, the tensors of each call determine it."""
    varlen: bool = False
    """True if sequences are packed end to end: q [TQ, HQ, D], k and v [TK, HKV, D].

    `cu_seqlens_q` and `cu_seqlens_k` hold their offsets."""
    lengths: Lengths = Lengths()
    """Promises about the lengths of the sequences."""
    buffers: dict[OwnName, Buffer] = Field(default_factory=dict)
    """Tensors that the expressions index, by name."""
    params: dict[OwnName, Param] = Field(default_factory=dict)
    """Scalars that the expressions use, by name."""
    score_mod: Expression = None
    """The changed score, from `score`, `b`, `h`, `q_idx`, `kv_idx`, sizes, params and buffers."""
    mask_mod: Expression = None
    """True for the pairs of positions that count, from the same names except `score`."""
    block_mask: Literal["auto", "always", "never"] = "auto"
    """When kernels visit the blocks of a block mask, which another kernel builds from `mask_mod`.

    `auto`: if ranges of positions cannot describe the mask. A block mask can serve one call or
    many.
    """
    sinks: bool = False
    """True if each query head has a learned logit, the argument `sinks` [HQ].

    It joins the sum of the softmax and has no value."""
    row_max: bool = False
    """True if calls can return the largest score of each row, with `return_max`."""
    fast_math: bool = False
    """True to allow cheaper approximations of functions such as tanh."""
    passes: Annotated[
        tuple[Literal["forward", "backward", "decode", "serve"], ...],
        Field(strict=False),
        BeforeValidator(passes_in_order),
    ] = ("forward", "backward")
    """Kernels to emit: `forward`, `backward`, `decode` for few queries over many keys, and `serve`
    for the batches of a serving engine: packed queries over paged keys."""
    kv_dtype: Literal["fp8_e4m3", "fp8_e5m2", "int8"] | None = None
    """Dtype of a quantized cache, for the pass `serve`. The default is `dtype`."""
    deterministic: Literal["batch"] | None = None
    """`batch`: the result of `serve` for a query does not depend on the rest of the batch, bit for
    bit.
    """
    backward_in_parts: bool = False
    """True if backward calls can share delta and the sum of dq.

    Such calls have the same queries, and each call has some of the keys."""
    align: Literal["start", "end"] | None = None
    """Positions of the queries. `start`: the first query is at 0. `end`: the last query is at the
    last key.

    The default is `end` with the passes `decode` and `serve` or with `paged_kv`, else `start`.
    """
    paged_kv: PagedKV | None = None
    """Keys and values in pages, with a number of keys for each sequence."""
    targets: Targets = Targets.model_validate({"triton": {}})
    """Languages of the emitted kernels, each with its options."""
    adapters: Adapters = ()
    """Programs that call the kernels. `kgen render` writes a package for each, as `kgen adapt`
    does.
    """

    @model_validator(mode="after")
    def _check(self) -> AttentionSpec:
        if "precision" in self.model_fields_set and self.dtype != "fp32":
            hint = "remove it, or use `dtype: fp32`"
            raise problem(
                "bad-precision",
                f"`precision` is for fp32, not {self.dtype}",
                hint,
                at=("precision",),
                key=True,
            )
        if self.paged_kv is not None and "backward" in self.passes:
            message = "`paged_kv` has no backward pass: a page may belong to several sequences"
            hint = "write `passes: [forward, decode]`, or remove `paged_kv`"
            raise problem("unsupported-pass", message, hint, at=("passes",))
        if self.targets.cuda is not None and "backward" not in self.passes:
            message = (
                "the target `cuda` emits delta, a step of the backward pass, but `passes` has "
                "no `backward`"
            )
            hint = "add `backward` to `passes`, or remove the target"
            raise problem("missing-pass", message, hint, at=("targets", "cuda", "passes"), key=True)
        if self.backward_in_parts and "backward" not in self.passes:
            message = "`backward_in_parts` needs the backward pass"
            hint = "add `backward` to `passes`, or remove `backward_in_parts`"
            raise problem("missing-pass", message, hint, at=("backward_in_parts",), key=True)
        if self.block_mask == "always":
            self._check_block_mask()
        if self.varlen:
            self._check_packed()
        check_serving(self)
        for field in ("sinks", "varlen"):
            if not getattr(self, field):
                continue
            if "decode" in self.passes or self.paged_kv is not None:
                message = f"decoding does not support `{field}` yet"
                hint = (
                    f"remove `{field}`, or write `passes: [forward, backward]` without `paged_kv`"
                )
                raise problem("unsupported-pass", message, hint, at=(field,), key=True)
            if self.targets.cuda is not None:
                message = f"delta on the target `cuda` does not support `{field}` yet"
                hint = "remove the target: the Triton file computes its delta itself"
                raise problem("unsupported-pass", message, hint, at=("targets", "cuda"), key=True)
        arguments = {
            *(("cu_seqlens_q", "cu_seqlens_k") if self.varlen else ()),
            *(("sinks",) if self.sinks else ()),
            *(("return_max", "row_max") if self.row_max else ()),
            *((KV_LENS,) if self.per_batch else ()),
            *(("block_table",) if self.paged_kv is not None else ()),
            *(SERVE_ARGUMENTS if "serve" in self.passes else ()),
        }
        for section, names in (("buffers", self.buffers), ("params", self.params)):
            for name in (name for name in names if name in arguments):
                message = f"`{name}` is already an argument of the emitted function"
                hint = "choose another name"
                raise problem("name-taken", message, hint, at=(section, name), key=True)
        taken_names(self.name, {"buffers": self.buffers, "params": self.params})
        return self

    def _check_block_mask(self) -> None:
        if self.mask_mod is None:
            message, hint = "a block mask needs a `mask_mod`", "remove it, or add a `mask_mod`"
        elif self.varlen:
            message, hint = (
                "packed sequences do not support block masks yet",
                "remove it, or remove `varlen`",
            )
        elif "decode" in self.passes or self.paged_kv is not None:
            message = "decoding does not support block masks yet"
            hint = "remove it, or write `passes: [forward, backward]` without `paged_kv`"
        else:
            return
        raise problem("unsupported-block-mask", message, hint, at=("block_mask",), key=True)

    def _check_packed(self) -> None:
        if self.lengths != Lengths():
            message = "packed sequences cannot have `lengths`: their lengths are on the device"
            raise problem(
                "bad-value", message, "remove `lengths` or `varlen`", at=("lengths",), key=True
            )
        refuse_lengths({name: buffer.shape for name, buffer in self.buffers.items()})

    @property
    def per_batch(self) -> bool:
        """True if each sequence has its own number of keys."""
        return self.lengths.kv.per_batch or self.paged_kv is not None

    @property
    def accuracy(self) -> Accuracy:
        """The accuracy of functions. TF32 products need no more than products of 16 bits."""
        if self.fast_math:
            return "fast"
        return "precise" if self.dtype == "fp32" and self.precision != "tf32" else "usual"

    @property
    def aligned_to_end(self) -> bool:
        """True if the last query is at the position of the last key."""
        newest = self.paged_kv is not None or {"decode", "serve"} & {*self.passes}
        return bool(newest) if self.align is None else self.align == "end"

    @model_serializer(mode="wrap")
    def _dump(self, handler: Callable[[AttentionSpec], dict[str, Any]]) -> dict[str, Any]:
        """Omit fields that were added later and have their defaults, so that hashes of specs stay
        the same.
        """
        return without_defaults(handler(self))

    def _kv_head(self) -> Node:
        """Return the key-value head that a query head reads."""
        h, hq, hkv = (Var(name, Type.INT) for name in ("h", "HQ", "HKV"))
        if self.gqa == 1:
            return h
        group = (
            Call("floordiv", (hq, hkv), Type.INT)
            if self.gqa == "any"
            else Const(self.gqa, Type.INT)
        )
        return Call("floordiv", (h, group), Type.INT)

    def expressions(self) -> Mapping[str, tuple[str, Scope, Type]]:
        """Return by field: the text, the names that it may use, and the type that its value must
        have.
        """
        scalars = dict.fromkeys((*INDICES, *SIZES), Type.INT) | {
            n: p.scalar for n, p in self.params.items()
        }
        buffers = {n: BufferType.of(b.element, b.shape, ANY) for n, b in self.buffers.items()}
        if self.per_batch:
            buffers[KV_LENS] = BufferType(Type.INT, 1, ("B",))
        score = Scope(
            {"score": Type.FLOAT, **scalars},
            buffers,
            constants=compiled_in(self.params),
            meanings={"h_kv": self._kv_head()},
        )
        only_scores = {
            "score": "a mask depends on positions, not on scores: use `score` in `score_mod`"
        }
        mask = replace(score, variables=scalars, elsewhere=only_scores)
        texts = (
            ("score_mod", self.score_mod, score, Type.FLOAT),
            ("mask_mod", self.mask_mod, mask, Type.BOOL),
        )
        return {
            f: (text.written, scope, result) for f, text, scope, result in texts if text is not None
        }

    def check(self, trees: Mapping[str, Node]) -> Iterator[PydanticCustomError]:
        """Yield the errors that only the typed `trees` (by field) show."""
        read = {name for tree in trees.values() for name in buffers_of(tree)}
        used = {name for tree in trees.values() for name in variables(tree)}
        learned = differentiable(trees["score_mod"]) if "score_mod" in trees else frozenset()
        for name, buffer in self.buffers.items():
            at = ("buffers", name)
            if name not in read:
                verb = "index" if buffer.shape else "use"
                hint = f"{verb} it in `score_mod` or `mask_mod`, or remove it"
                yield problem(
                    "unused-buffer",
                    f"no expression reads the buffer `{name}`",
                    hint,
                    at=at,
                    key=True,
                )
            elif buffer.grad and name not in learned:
                message = f"`score_mod` is not differentiable in `{name}`, so it has no gradient"
                hint = "remove `grad`, or let a value of `score_mod` depend on it"
                yield problem("bad-grad", message, hint, at=(*at, "grad"), key=True)
            elif buffer.grad and "backward" not in self.passes:
                message = f"the gradient of `{name}` needs the backward pass"
                hint = "remove `grad`, or add `backward` to `passes`"
                yield problem("bad-grad", message, hint, at=(*at, "grad"), key=True)
        if self._leaves_nothing(trees):
            field = "mask_mod" if "mask_mod" in trees else "score_mod"
            hint = "a condition in it is always false: check its numbers and params"
            yield problem(
                "empty-mask", f"`{field}` removes all pairs of positions", hint, at=(field,)
            )
        yield from self._check_alignment(trees)
        for name in self.params:
            if name not in used:
                hint = "use it in `score_mod` or `mask_mod`, or remove it"
                yield problem(
                    "unused-param",
                    f"no expression uses `{name}`",
                    hint,
                    at=("params", name),
                    key=True,
                )

    def _leaves_nothing(self, trees: Mapping[str, Node]) -> bool:
        try:
            return canonical(trees, numbers(self.params)).get("mask_mod") == FALSE
        except RecursionError:
            return False  # too large: planning reports it

    def _check_alignment(self, trees: Mapping[str, Node]) -> Iterator[PydanticCustomError]:
        """Refuse `q_idx` as an index of SQ rows if queries are at the end: it is then a position
        among the keys.
        """
        if not self.aligned_to_end:
            return
        position = Var("q_idx", Type.INT)
        for read in (r for tree in trees.values() for r in reads(tree)):
            shape = self.buffers[read.buffer].shape if read.buffer in self.buffers else ()
            wrong = [
                i
                for i, at in enumerate(read.indices)
                if at == position and shape[i : i + 1] == ("SQ",)
            ]
            if wrong:
                message = (
                    f"`q_idx` is a position among the SK keys, but `{read.buffer}` has SQ "
                    "elements there"
                )
                hint = "declare that dimension as SK, or write `align: start`"
                yield problem(
                    "bad-shape", message, hint, at=("buffers", read.buffer, "shape", wrong[0])
                )
