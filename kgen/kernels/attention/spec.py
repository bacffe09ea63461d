"""`kernel: attention`: what a user may say about one attention variant."""

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
from kgen.kernels.attention.fields import Param, bounded, checked_gqa, passes_in_order, without_defaults
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
"""The argument that says how many keys each sequence has."""
SIZES = ("B", "HQ", "HKV", "SQ", "SK")
ANY = "any"
"""An extent of a buffer that each call's tensor has of its own; as a dtype, any of `REALS`."""
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
PASSES = ("forward", "backward", "decode")

Name = Annotated[str, AfterValidator(checked_name), AfterValidator(refuse(RESERVED))]
OwnName = Annotated[str, AfterValidator(checked_own_name), AfterValidator(refuse(RESERVED))]

# --- parts ------------------------


class HeadDim(SpecModel):
    """Elements per head. They need not be powers of two."""

    qk: Annotated[int, Field(ge=1, le=1024, examples=[192])]
    """Of a query and a key."""
    v: Annotated[int, Field(ge=1, le=1024, examples=[128])]
    """Of a value and of the output."""


def _head_dim(value: Any) -> Any:
    if isinstance(value, dict | HeadDim):
        return value
    if not is_integer(value):
        hint = "write `head_dim: 128` or `head_dim: {qk: 192, v: 128}`"
        raise problem("wrong-type", f"`head_dim` must be an integer or a mapping, not {shown(value)}", hint)
    return {"qk": value, "v": value}


class Length(SpecModel):
    """A promise about one sequence length: it is a multiple of `multiple_of`; 1 promises nothing."""

    multiple_of: Annotated[int, Field(ge=1, le=2**20, examples=[128])]
    """The emitted code drops the bounds checks that this makes needless."""


def _length(value: Any) -> Any:
    if value == "any":
        return {"multiple_of": 1}
    if isinstance(value, dict | Length):
        return value
    hint = "write `any` or `{multiple_of: 128}`"
    raise problem("wrong-type", f"a length must be `any` or a promise, not {shown(value)}", hint)


class KeyLength(Length):
    """What is known about the number of keys."""

    multiple_of: Annotated[int, Field(ge=1, le=2**20, examples=[128])] = 1
    """The emitted code drops the bounds checks that this makes needless."""
    per_batch: bool = False
    """Each sequence has its own number of keys, `kv_lens` [B] int32, at most SK; keys beyond it are not read."""


class Lengths(SpecModel):
    """What is known about the lengths of the sequences."""

    q: Annotated[Length, BeforeValidator(_length, json_schema_input_type=Literal["any"] | Length)] = Length(
        multiple_of=1
    )
    """Of the queries."""
    kv: Annotated[KeyLength, BeforeValidator(_length, json_schema_input_type=Literal["any"] | KeyLength)] = (
        KeyLength()
    )
    """Of the keys and values."""


class PagedKV(SpecModel):
    """Keys and values live in a pool of pages, [pages, page_size, HKV, D], and `block_table` [B, n] int32 names
    the pages of each sequence in order."""

    page_size: Annotated[int, Field(ge=1, le=2**20, examples=[64])]
    """Positions per page; a power of two."""

    @model_validator(mode="after")
    def _check(self) -> PagedKV:
        if self.page_size & (self.page_size - 1):
            message = f"a page of {self.page_size} positions is not a power of two"
            raise problem("bad-value", message, "use 16, 64 or 256, for example", at=("page_size",))
        return self


def _extent(value: Any) -> Any:
    if value in (*SIZES, ANY) or (is_integer(value) and 1 <= value < 2**31):
        return value
    hint = did_you_mean(value.upper(), SIZES) if isinstance(value, str) else None
    hint = hint or f"a size is a positive integer, one of {', '.join(SIZES)}, or `{ANY}`"
    raise problem("bad-shape", f"{shown(value)} is not a size", hint)


_Named = Literal["B", "HQ", "HKV", "SQ", "SK", "any"]
Extent = Annotated[
    int | _Named,
    BeforeValidator(_extent, json_schema_input_type=Annotated[int, Field(ge=1)] | _Named),
]


class Buffer(SpecModel):
    """A tensor that the expressions read. An index outside of it reads zero."""

    shape: Annotated[tuple[Extent, ...], Field(strict=False, max_length=MAX_RANK, examples=[["HQ"]])]
    """Integers, the sizes B, HQ, HKV, SQ, SK (batch, query heads, key-value heads, queries, keys), and `any`: what the
    tensor of a call has. Empty for one number, which expressions use by name."""
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16", "int32", "int64", "uint8", "bool", "any"], Field(examples=["fp32"])
    ]
    """Of the elements in memory; kernels compute in fp32 and int32. `any`: fp32, bf16 or fp16, the one that the
    tensor of a call has."""
    grad: bool = False
    """Whether the backward pass gives a gradient for it."""
    sorted: bool = False
    """A promise that each row (the last axis) ascends: masks that compare its elements then skip tiles."""
    within: Annotated[int, Field(ge=1, le=2**30, examples=[2**29])] | None = None
    """A promise that no element of an integer buffer is further from zero, for proofs that sums of it fit 32 bits."""

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
        """The same in words."""
        *first, last = self.dtypes
        return f"{', '.join(first)} or {last}" if first else last

    @model_validator(mode="after")
    def _check(self) -> Buffer:
        if self.grad and self.element is not Type.FLOAT:
            message = f"a buffer of {self.dtype} has no gradient"
            raise problem(
                "bad-grad", message, "remove `grad`, or use a floating-point dtype", at=("grad",), key=True
            )
        if self.sorted and not self.shape:
            message = "a buffer without dimensions has no row to be sorted"
            raise problem("bad-sorted", message, "remove `sorted`", at=("sorted",), key=True)
        if self.sorted and self.dtype not in ("int32", "int64"):
            message = f"only buffers of int32 and int64 can be sorted, this one is {self.dtype}"
            raise problem("bad-sorted", message, "remove `sorted`, or use int32", at=("sorted",), key=True)
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
    """Name of the emitted function, lower_snake_case."""
    summary: Summary = UserText("")
    """One line for people; it opens the docstring of the emitted file."""
    license: License = UserText("Apache-2.0")
    """SPDX identifier for the emitted files."""
    dtype: Annotated[Literal["bf16", "fp16", "fp32"], Field(examples=["bf16"])]
    """Of q, k, v and the output."""
    precision: Literal["ieee", "tf32", "tf32x3"] = "ieee"
    """How fp32 matrix products are computed; only with `dtype: fp32`."""
    head_dim: Annotated[
        HeadDim,
        BeforeValidator(_head_dim, json_schema_input_type=Annotated[int, Field(ge=1, le=1024)] | HeadDim),
        Field(examples=[128]),
    ]
    """Elements per head: one number, or {qk, v}."""
    gqa: Annotated[
        int | Literal["any"],
        BeforeValidator(checked_gqa, json_schema_input_type=Annotated[int, Field(ge=1)] | Literal["any"]),
    ] = 1
    """Query heads for each key-value head; `any` leaves it to the launch."""
    varlen: bool = False
    """Sequences lie end to end: q [TQ, HQ, D], k and v [TK, HKV, D], as `cu_seqlens_q` and `cu_seqlens_k` say."""
    lengths: Lengths = Lengths()
    """What is known about the lengths of the sequences."""
    buffers: dict[OwnName, Buffer] = Field(default_factory=dict)
    """Tensors that the expressions may index, by name."""
    params: dict[OwnName, Param] = Field(default_factory=dict)
    """Scalars that the expressions may use, by name."""
    score_mod: Expression = None
    """The new score, from `score`, `b`, `h`, `q_idx`, `kv_idx`, sizes, params and buffers."""
    mask_mod: Expression = None
    """True for the pairs that are kept; from the same names without `score`."""
    block_mask: Literal["auto", "always", "never"] = "auto"
    """Whether kernels walk lists of the blocks that the mask leaves, which a kernel makes of it at every call or
    once: `auto`, where ranges of positions cannot tell them."""
    sinks: bool = False
    """Each query head has a learned logit, the argument `sinks` [HQ], that joins the softmax and has no value."""
    fast_math: bool = False
    """Allows cheaper approximations of functions such as tanh."""
    passes: Annotated[
        tuple[Literal["forward", "backward", "decode"], ...],
        Field(strict=False),
        BeforeValidator(passes_in_order),
    ] = ("forward", "backward")
    """Which kernels to emit: `forward`, `backward`, and `decode` for few queries over many keys."""
    backward_in_parts: bool = False
    """Calls of the backward pass with the same queries, each with some of the keys, can share delta and dq's sum."""
    align: Literal["start", "end"] | None = None
    """Where `q_idx` counts from: `start`, the first query is at position 0; `end`, the last query is at the
    position of the last key. `end` where there is a pass `decode` or `paged_kv`, else `start`."""
    paged_kv: PagedKV | None = None
    """Keys and values in pages, with a number of keys per sequence."""
    targets: Targets = Targets.model_validate({"triton": {}})
    """What to emit them for."""
    adapters: Adapters = ()
    """By whom they are to be called: folders beside that of the kernels, as `kgen adapt` writes them."""

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
            message = "there is no backward pass through pages: a page may belong to many sequences"
            hint = "write `passes: [forward, decode]`, or remove `paged_kv`"
            raise problem("unsupported-pass", message, hint, at=("passes",))
        if self.targets.cuda is not None and "backward" not in self.passes:
            message = "delta is a step of the backward pass, which the spec does not ask for"
            hint = "add `backward` to `passes`, or remove the target"
            raise problem("missing-pass", message, hint, at=("targets", "cuda", "passes"), key=True)
        if self.backward_in_parts and "backward" not in self.passes:
            message = "there is no backward pass to take in parts"
            hint = "add `backward` to `passes`, or remove `backward_in_parts`"
            raise problem("missing-pass", message, hint, at=("backward_in_parts",), key=True)
        if self.block_mask == "always":
            self._check_block_mask()
        if self.varlen:
            self._check_packed()
        for field in ("sinks", "varlen"):
            if not getattr(self, field):
                continue
            if "decode" in self.passes or self.paged_kv is not None:
                message = f"decoding does not support `{field}` yet"
                hint = f"remove `{field}`, or write `passes: [forward, backward]` without `paged_kv`"
                raise problem("unsupported-pass", message, hint, at=(field,), key=True)
            if self.targets.cuda is not None:
                message = f"delta on the target `cuda` does not support `{field}` yet"
                hint = "remove the target: the Triton file computes its delta itself"
                raise problem("unsupported-pass", message, hint, at=("targets", "cuda"), key=True)
        arguments = ("cu_seqlens_q", "cu_seqlens_k") * self.varlen + ("sinks",) * self.sinks
        arguments += (KV_LENS,) * self.per_batch + ("block_table",) * (self.paged_kv is not None)
        for section, names in (("buffers", self.buffers), ("params", self.params)):
            for name in names:
                if name in arguments:
                    message = f"`{name}` is already an argument of the emitted function"
                    hint = "choose another name; the kernel reads that one by itself"
                    raise problem("name-taken", message, hint, at=(section, name), key=True)
        taken_names(self.name, {"buffers": self.buffers, "params": self.params})
        return self

    def _check_block_mask(self) -> None:
        if self.mask_mod is None:
            message, hint = "there is no `mask_mod` to make a block mask of", "remove it, or add a `mask_mod`"
        elif self.varlen:
            message, hint = "packed sequences do not support block masks yet", "remove it, or `varlen`"
        elif "decode" in self.passes or self.paged_kv is not None:
            message = "decoding does not support block masks yet"
            hint = "remove it, or write `passes: [forward, backward]` without `paged_kv`"
        else:
            return
        raise problem("unsupported-block-mask", message, hint, at=("block_mask",), key=True)

    def _check_packed(self) -> None:
        if self.lengths != Lengths():
            message = "the lengths of packed sequences are on the device, so nothing can be promised of them"
            raise problem("bad-value", message, "remove `lengths`, or `varlen`", at=("lengths",), key=True)
        for name, buffer in self.buffers.items():
            if sized := [i for i, size in enumerate(buffer.shape) if size in ("SQ", "SK")]:
                message = (
                    f"each packed sequence has its own {buffer.shape[sized[0]]}, which `{name}` cannot have"
                )
                hint = "give the buffer a fixed size: an index outside of it reads as zero"
                raise problem("bad-shape", message, hint, at=("buffers", name, "shape", sized[0]))

    @property
    def per_batch(self) -> bool:
        """Whether each sequence has its own number of keys, `kv_lens`."""
        return self.lengths.kv.per_batch or self.paged_kv is not None

    @property
    def accuracy(self) -> Accuracy:
        """Of functions: products in TF32 are no better than 16 bits."""
        if self.fast_math:
            return "fast"
        return "precise" if self.dtype == "fp32" and self.precision != "tf32" else "usual"

    @property
    def aligned_to_end(self) -> bool:
        """Whether the last query stands at the position of the last key."""
        newest = "decode" in self.passes or self.paged_kv is not None
        return newest if self.align is None else self.align == "end"

    @model_serializer(mode="wrap")
    def _dump(self, handler: Callable[[AttentionSpec], dict[str, Any]]) -> dict[str, Any]:
        """A spec that does not mention what came later is dumped, and so hashed, as before there was such a thing."""
        return without_defaults(handler(self))

    def _kv_head(self) -> Node:
        """The head of K and V that a query head reads."""
        h, hq, hkv = (Var(name, Type.INT) for name in ("h", "HQ", "HKV"))
        if self.gqa == 1:
            return h
        group = Call("floordiv", (hq, hkv), Type.INT) if self.gqa == "any" else Const(self.gqa, Type.INT)
        return Call("floordiv", (h, group), Type.INT)

    def expressions(self) -> Mapping[str, tuple[str, Scope, Type]]:
        """By field: the text, the names that it may use, and the type that its value must have."""
        scalars = dict.fromkeys((*INDICES, *SIZES), Type.INT) | {n: p.scalar for n, p in self.params.items()}
        buffers = {n: BufferType.of(b.element, b.shape, ANY) for n, b in self.buffers.items()}
        if self.per_batch:
            buffers[KV_LENS] = BufferType(Type.INT, 1, ("B",))
        score = Scope(
            {"score": Type.FLOAT, **scalars},
            buffers,
            constants=compiled_in(self.params),
            meanings={"h_kv": self._kv_head()},
        )
        only_scores = {"score": "a mask sees positions, not scores: use `score` in `score_mod`"}
        mask = replace(score, variables=scalars, elsewhere=only_scores)
        texts = (
            ("score_mod", self.score_mod, score, Type.FLOAT),
            ("mask_mod", self.mask_mod, mask, Type.BOOL),
        )
        return {f: (text.written, scope, result) for f, text, scope, result in texts if text is not None}

    def check(self, trees: Mapping[str, Node]) -> Iterator[PydanticCustomError]:
        """What only the typed `trees` (by field) show to be wrong."""
        read = {name for tree in trees.values() for name in buffers_of(tree)}
        used = {name for tree in trees.values() for name in variables(tree)}
        learned = differentiable(trees["score_mod"]) if "score_mod" in trees else frozenset()
        for name, buffer in self.buffers.items():
            at = ("buffers", name)
            if name not in read:
                verb = "index" if buffer.shape else "use"
                hint = f"{verb} it in `score_mod` or `mask_mod`, or remove it"
                yield problem(
                    "unused-buffer", f"no expression reads the buffer `{name}`", hint, at=at, key=True
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
            hint = "some condition of it can never hold: look at its numbers and params"
            yield problem("empty-mask", f"`{field}` leaves no pair of positions", hint, at=(field,))
        yield from self._check_alignment(trees)
        for name in self.params:
            if name not in used:
                hint = "use it in `score_mod` or `mask_mod`, or remove it"
                yield problem(
                    "unused-param", f"no expression uses `{name}`", hint, at=("params", name), key=True
                )

    def _leaves_nothing(self, trees: Mapping[str, Node]) -> bool:
        try:
            return canonical(trees, numbers(self.params)).get("mask_mod") == FALSE
        except RecursionError:
            return False  # too large, as is said where it is planned

    def _check_alignment(self, trees: Mapping[str, Node]) -> Iterator[PydanticCustomError]:
        """With queries at the end, `q_idx` is a position among the keys, not a row of a buffer with SQ rows."""
        if not self.aligned_to_end:
            return
        position = Var("q_idx", Type.INT)
        for read in (r for tree in trees.values() for r in reads(tree)):
            shape = self.buffers[read.buffer].shape if read.buffer in self.buffers else ()
            wrong = [i for i, at in enumerate(read.indices) if at == position and shape[i : i + 1] == ("SQ",)]
            if wrong:
                message = (
                    f"`q_idx` is a position among the SK keys here, but `{read.buffer}` has SQ elements there"
                )
                hint = "declare that dimension as SK, or write `align: start`"
                yield problem("bad-shape", message, hint, at=("buffers", read.buffer, "shape", wrong[0]))
