"""The schema of `kernel: linear_attention`, a layer of linear attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from kgen.expr.fold import folded
from kgen.expr.nodes import Const, Node, Read, Type, Var, buffers_of, reads, substitute, variables
from kgen.expr.scope import BufferType, Scope
from kgen.kernels.linear_attention.fields import (
    SIZES,
    Buffer,
    FeatureMap,
    HeadDim,
    Heads,
    Name,
    OwnName,
    Width,
    checked_head_dim,
    checked_heads,
)
from kgen.spec.adapters import adapters_field
from kgen.spec.common import (
    Expression,
    License,
    Summary,
    checked_passes,
    differentiable,
    taken_names,
)
from kgen.spec.problems import SpecModel, problem
from kgen.spec.targets import targets_model
from kgen.spec.user_text import UserText

COLUMNS = {"decay": "K", "beta": None, "skip": "V", "output_gate": "V", "output": "V"}
"""The columns along which the value of each expression with buffers may vary."""
FIELDS = ("decay", "beta", "q_map", "k_map", "skip", "output_gate", "output")
"""The fields with expressions."""
ADDED = ("output_gate", "output_norm", "output_eps", "output")
"""The fields that a dump of a spec omits if they are absent."""
PASSES = ("forward", "backward", "decode")

if TYPE_CHECKING:
    from kgen.spec.targets import Targets

    Adapters = tuple[str, ...]
else:
    Targets = targets_model("linear_attention", __name__)
    Adapters = adapters_field("linear_attention")


# --- the spec ------------------------


class LinearAttentionSpec(SpecModel):
    """A layer of linear attention, a recurrence with a state S [K, V] for each value head.

    For each token t, with b the base of the decay:

        S' = diag(b**decay[t]) @ S[t - 1]
        u[t] = beta[t] * v[t]                        for `rule: add`
        u[t] = beta[t] * (v[t] - S'^T @ k[t])        for `rule: delta`
        S[t] = S' + outer(k[t], u[t])
        o[t] = scale * S[t]^T @ q[t] + skip[t]

    Here q and k are already the results of their feature maps and of `qk_norm`. A gate, a norm and
    an expression may follow, for each row of V columns:

        o = o * output_gate
        o = o / sqrt(mean(o**2) + output_eps)        for `output_norm: rms`
        o = output(o)
    """

    kernel: Literal["linear_attention"]
    """The family of kernels."""
    name: Annotated[Name, Field(examples=["gated_delta_rule"])]
    """Name of the emitted function, in lower_snake_case."""
    summary: Summary = UserText("")
    """One line that describes the kernel. It begins the docstring of the emitted file."""
    license: License = UserText("Apache-2.0")
    """SPDX license identifier in the header of the emitted files."""
    dtype: Annotated[Literal["bf16", "fp16"], Field(examples=["bf16"])]
    """Dtype of q, k, v and the output. Sums are fp32."""
    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of initial and final states. Kernels sum them up in fp32."""
    head_dim: Annotated[
        HeadDim,
        BeforeValidator(checked_head_dim, json_schema_input_type=Width | HeadDim),
        Field(examples=[128]),
    ]
    """Elements per head, 64, 128 or 256: one number, or {qk, v}."""
    heads: Annotated[
        Heads, BeforeValidator(checked_heads, json_schema_input_type=Literal["any"] | Heads)
    ] = Heads()
    """Numbers of heads: {qk: 16, v: 32} compiles both in, {group: 2} only their ratio, `any`
    nothing.
    """
    buffers: dict[OwnName, Buffer] = Field(default_factory=dict)
    """Tensors that the expressions index, by name."""
    # Exponents are subtracted before the power, so that differences far down do not overflow.
    decay: Expression = None
    """The logarithm of the factor of the state at token t, at most 0. Without it, there is no
    decay.

    A value that uses `c` is the factor of one row of the state, a column of the keys.
    """
    gate_base: Literal["e", 2] = "e"
    """The base of the decay: e, or 2."""
    rule: Literal["add", "delta"] = "add"
    """`add` adds the outer product of key and value to the state. `delta` first subtracts the value
    that the state has for the key.
    """
    beta: Expression = None
    """The factor of the update at token t; the default is 1."""
    q_map: FeatureMap = None
    """The feature map of queries, elementwise in `x`; the default is `x`."""
    k_map: FeatureMap = None
    """The feature map of keys, elementwise in `x`; the default is `x`."""
    qk_norm: Literal["l2"] | None = None
    """`l2` divides each row of q and of k by the root of its sum of squares plus `eps`.

    The norm follows the feature maps."""
    eps: Annotated[float, Field(ge=0, le=1, strict=False)] | None = None
    """The number that `qk_norm` adds to the sum of squares; the default is 1e-6."""
    scale: Annotated[float, Field(strict=False)] | None = None
    """The default of the argument `scale`, which multiplies the queries; 1 / sqrt(K) without it."""
    skip: Expression = None
    """A term of the output from `v`, the value at the token and column, and buffers."""
    output_gate: Expression = None
    """A factor of the output before `output_norm`, from buffers."""
    output_norm: Literal["rms"] | None = None
    """`rms` divides each row of o by the root of its mean square plus `output_eps`.

    A row has the V columns of a token and head. The norm follows `skip` and `output_gate`."""
    output_eps: Annotated[float, Field(ge=1e-12, le=1, strict=False)] | None = None
    """The number that `output_norm` adds to the mean square; the default is 1e-6."""
    output: Expression = None
    """The output from `o`, its value after the norm, and buffers; the default is `o`."""
    varlen: bool = False
    """True if sequences are packed end to end in one row; `cu_seqlens` holds their offsets."""
    passes: Annotated[
        tuple[Literal["forward", "backward", "decode"], ...],
        Field(strict=False),
        BeforeValidator(checked_passes(PASSES)),
    ] = ("forward", "backward")
    """Kernels to emit: `forward`, `backward`, and `decode`, a function that steps a state."""
    save: Literal["states", "recompute"] | None = None
    """`states`: forward keeps the state before each chunk for backward, the default. `recompute`:
    backward computes them again.
    """
    chunk_size: Literal[16, 32, 64, 128] = 64
    """Tokens per chunk of the forward and backward kernels."""
    targets: Targets = Targets.model_validate({"triton": {}})
    """Languages of the emitted kernels, each with its options."""
    adapters: Adapters = ()
    """Programs that call the kernels. `kgen render` writes a package for each, as `kgen adapt`
    does.
    """

    @property
    def saves_states(self) -> bool:
        """True if forward keeps the states for backward."""
        return self.save != "recompute"

    @property
    def norm_eps(self) -> float | None:
        """The number under the root of `qk_norm`, or None without a norm."""
        return None if self.qk_norm is None else 1e-6 if self.eps is None else self.eps

    @property
    def output_norm_eps(self) -> float | None:
        """The number under the root of `output_norm`, or None without a norm."""
        if self.output_norm is None:
            return None
        return 1e-6 if self.output_eps is None else self.output_eps

    @property
    def called(self) -> tuple[str, ...]:
        """Return the names of the emitted functions."""
        return (self.name, f"{self.name}_decode") if "decode" in self.passes else (self.name,)

    @model_validator(mode="after")
    def _check(self) -> LinearAttentionSpec:
        needs = {
            "gate_base": (self.decay is None, "a `decay`", "write `decay: g[t, h]`"),
            "eps": (self.qk_norm is None, "`qk_norm`", "write `qk_norm: l2`"),
            "output_gate": (
                self.output_norm is None,
                "`output_norm`",
                "write the factor in `output`, as in `output: o * z[t, h, c]`",
            ),
            "output_eps": (self.output_norm is None, "`output_norm`", "write `output_norm: rms`"),
            "save": (
                "backward" not in self.passes,
                "the backward pass",
                "add `backward` to `passes`",
            ),
        }
        for field, (missing, need, remedy) in needs.items():
            if missing and field in self.model_fields_set and getattr(self, field) is not None:
                message = f"`{field}` needs {need}"
                raise problem(
                    "unused-field", message, f"remove it, or {remedy}", at=(field,), key=True
                )
        for name in self.buffers:
            if name in self.called[1:]:
                message = f"`{name}` is already the name of an emitted function"
                raise problem(
                    "name-taken", message, "choose another name", at=("buffers", name), key=True
                )
        taken_names(self.name, {"buffers": self.buffers})
        return self

    @model_serializer(mode="wrap")
    def _dump(self, handler: Callable[[LinearAttentionSpec], dict[str, Any]]) -> dict[str, Any]:
        """Omit fields that were added later and are absent, so that hashes of specs stay the
        same.
        """
        dumped = handler(self)
        return {n: x for n, x in dumped.items() if not (n in ADDED and x is None)}

    # Expressions ------------------------

    def expressions(self) -> Mapping[str, tuple[str, Scope, Type]]:
        """Return by field: the text, the names that it may use, and the type that its value must
        have.
        """
        others = dict.fromkeys(("t", "h", "c", "q", "k", "v", "o", *SIZES), _ELEMENTWISE)
        inputs = {n: _NO_INPUT.format(n) for n in ("q", "k")} | {"v": _ONLY_IN_SKIP}
        feature_map = replace(self._scope(**others), variables={"x": Type.FLOAT})
        scopes = {
            "decay": self._scope("t", "h", "c", v=_ONLY_IN_SKIP, o=_ONLY_IN_OUTPUT),
            "beta": self._scope("t", "h", v=_ONLY_IN_SKIP, o=_ONLY_IN_OUTPUT, c=_ONE_PER_HEAD),
            "q_map": feature_map,
            "k_map": feature_map,
            "skip": self._scope("t", "h", "c", "v", o=_ONLY_IN_OUTPUT),
            "output_gate": self._scope("t", "h", "c", o=_FACTOR, **inputs),
            "output": self._scope("t", "h", "c", "o", **inputs),
        }
        texts = {field: getattr(self, field) for field in FIELDS}
        return {
            field: (text.written, scopes[field], Type.FLOAT)
            for field, text in texts.items()
            if text is not None
        }

    def _scope(self, *names: str, **elsewhere: str) -> Scope:
        scalars = dict.fromkeys((*names, *SIZES), Type.INT)
        scalars |= {name: Type.FLOAT for name in ("v", "o") if name in names}
        known = {size: n for size, n in (("H", self.heads.qk), ("HV", self.heads.v)) if n}
        buffers = {
            name: BufferType(buffer.element, len(buffer.shape))
            for name, buffer in self.buffers.items()
        }
        return Scope(scalars, buffers, elsewhere, known)

    def check(self, trees: Mapping[str, Node]) -> Iterator[PydanticCustomError]:
        """Yield the errors that only the typed `trees` (by field) show."""
        for field, tree in trees.items():
            yield from self._check_names(field, tree)
        used = {name for tree in trees.values() for name in buffers_of(tree)}
        learned = {name for tree in trees.values() for name in differentiable(tree)}
        for name, buffer in self.buffers.items():
            at = ("buffers", name)
            if name not in used:
                hint = f"index it in `{'`, `'.join(COLUMNS)}`, or remove it"
                message = f"no expression reads the buffer `{name}`"
                yield problem("unused-buffer", message, hint, at=at, key=True)
            elif buffer.grad and name not in learned:
                message = f"no expression is differentiable in `{name}`, so it has no gradient"
                hint = "remove `grad`, or let a value depend on it"
                yield problem("bad-grad", message, hint, at=(*at, "grad"), key=True)
            elif buffer.grad and "backward" not in self.passes:
                message = f"the gradient of `{name}` needs the backward pass"
                hint = "remove `grad`, or add `backward` to `passes`"
                yield problem("bad-grad", message, hint, at=(*at, "grad"), key=True)

    def _check_names(self, field: str, tree: Node) -> Iterator[PydanticCustomError]:
        needed = {"q_map": "x", "k_map": "x", "skip": "v", "output": "o"}.get(field)
        if needed and needed not in variables(tree):
            hint = f"use `{needed}`, or remove `{field}`"
            yield problem("unused-name", f"`{field}` does not use `{needed}`", hint, at=(field,))
        elif field == "output" and "o" not in differentiable(tree):
            kind = "an integer" if tree.type.integral else "not differentiable in `o`"
            hint = "write a value that changes with `o`, such as `o * silu(z[t, h, c])`"
            yield problem("wrong-type", f"`output` is {kind}", hint, at=(field,))
        for read in dict.fromkeys(reads(tree)):
            yield from self._check_read(field, read)
        if field == "decay" and _grows(values(tree)):
            message = "`decay` is above 0 for all values of its buffers, so the state grows"
            hint = "it is the logarithm of the factor of the state: write `-(...)`, at most 0"
            yield problem("positive-decay", message, hint, at=(field,))
        if "t" in variables(values(tree)):
            message = "`t` is only an index: the value of an expression cannot depend on it"
            hint = "write a buffer of shape [T, HV] for values that depend on the position"
            yield problem("bad-index", message, hint, at=(field,))

    def _check_read(self, field: str, read: Read) -> Iterator[PydanticCustomError]:
        buffer = self.buffers[read.buffer]
        wanted = ", ".join(buffer.indices)
        if buffer.columns not in (None, COLUMNS[field]):
            of = {"K": "keys", "V": "values"}[str(buffer.columns)]
            others = {f for f, columns in COLUMNS.items() if columns == buffer.columns}
            message = f"`{read.buffer}` varies along the columns of {of}, but `{field}` does not"
            hint = f"use it in `{'` or `'.join(sorted(others))}`, or change its shape"
            yield problem("bad-index", message, hint, at=(field,))
        elif tuple(read.indices) != tuple(Var(name, Type.INT) for name in buffer.indices):
            message = f"`{read.buffer}` must be read at `{read.buffer}[{wanted}]`"
            yield problem("bad-index", message, f"write `{read.buffer}[{wanted}]`", at=(field,))


_ONLY_IN_SKIP = "`v` is the value of a column: use it in `skip`"
_ONLY_IN_OUTPUT = "`o` is the output after `output_norm`: use it in `output`"
_FACTOR = "`output_gate` is a factor of the output before the norm: use `o` in `output`"
_NO_INPUT = "the output depends on `{}` only through the state: write a buffer of shape [T, HV, V]"
_ONE_PER_HEAD = "`beta` is one number per head, so it has no column `c`"
_ELEMENTWISE = "a feature map is elementwise: it reads only `x`"


def values(tree: Node) -> Node:
    """Return the tree with a variable of the buffer's name for each read.

    A checked expression reads a buffer only at its own indices, so the name determines the value.
    """
    return substitute(tree, {read: Var(read.buffer, read.type) for read in reads(tree)})


def _grows(decay: Node) -> bool:
    """True if the value is above 0 at all sample points of buffers, heads and columns."""
    random = Random(0)
    for _ in range(32):
        sizes = {"H": 8, "HV": 8, "h": random.randrange(8), "c": random.randrange(64)}
        point: dict[Node, Node] = {
            Var(name, Type.INT): Const(value, Type.INT) for name, value in sizes.items()
        }
        for name in sorted(variables(decay) - sizes.keys()):
            point[Var(name, Type.FLOAT)] = Const(random.uniform(-8, 8), Type.FLOAT)
        value = folded(substitute(decay, point), {})
        if not isinstance(value, Const) or value.value <= 0:
            return False
    return True
