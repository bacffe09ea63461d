"""The functions of linear attention for callers: arguments, checks and words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from kgen.expr.nodes import buffers_of
from kgen.kernels.linear_attention.plan.planning import LinearAttentionPlan
from kgen.spec.common import differentiable
from kgen.targets.arguments import (
    NO_BACKWARD,
    NO_DERIVATIVE,
    NOT_ASKED_FOR,
    NOT_LEARNED,
    Derivatives,
    cast_lines,
    dense,
    derivatives_of,
)
from kgen.targets.signature import Signature
from kgen.targets.template import Template
from kgen.targets.triton.text import TORCH_DTYPES

STEPPED = ("state", "states")
"""The states of the function that steps them: each sequence's, and those after each token."""


@dataclass(frozen=True)
class Docstring(Template):
    """The part of a function's docstring on arguments and results."""

    template: ClassVar[str] = "linear_attention/triton/_docstring.j2"

    K: int
    V: int
    BT: int
    least: int
    """BT - 1."""
    dtype: str
    state_dtype: str
    head_words: str
    buffer_words: list[str]
    sequences: str
    """The number of sequences, in a shape."""
    varlen: bool
    decodes: bool
    """True for the function that steps a state."""
    scale: str
    """The default of `scale`."""
    grad_words: str | None
    derivatives: Derivatives


@dataclass(frozen=True)
class Check:
    """The condition of an error, and its message."""

    wrong: str
    message: str


@dataclass(frozen=True)
class Arguments(Template):
    """The statements that check the arguments of a function."""

    template: ClassVar[str] = "linear_attention/triton/_arguments.j2"

    name: str
    assigned: list[str]
    """Assignments from the arguments of callers to names of this file, where they differ."""
    dense_check: str
    casts: list[str]
    tensors: list[str]
    """A Python tuple of label, tensor, number of dimensions and dtypes for each tensor."""
    optional: str
    """The tensor that may be None."""
    checks: list[Check]
    varlen: bool
    derivatives: Derivatives
    scale: str

    def launch_functions(self) -> Iterable[str]:
        names = ["_cast", "_dense", "_real", *(["_dtype"] if self.varlen else [])]
        return (*names, *self.derivatives.launch_functions())


@dataclass(frozen=True)
class Function(Template):
    """A function for callers."""

    template: ClassVar[str] = "linear_attention/triton/_call.j2"

    name: str
    signature: str
    summary: str
    docstring: Docstring
    arguments: Arguments
    made: list[str]
    """The statements that call the operator and return."""


@dataclass(frozen=True)
class FunctionOfChunks(Function):
    """A function whose statements count chunks."""

    def launch_functions(self) -> Iterable[str]:
        return ("_cdiv",)


@dataclass(frozen=True)
class KeepingFunction(FunctionOfChunks):
    """A function that also decides whether forward keeps tensors for backward."""

    def launch_functions(self) -> Iterable[str]:
        return ("_cdiv", "_transformed")


class Interface:
    """The functions of one plan: arguments, checks and words."""

    def __init__(self, plan: LinearAttentionPlan, called: Mapping[str, str]) -> None:
        self.plan, self.spec, self.called = plan, plan.spec, called
        self.K, self.V = self.spec.head_dim.qk, self.spec.head_dim.v
        self.sequences = "N" if self.spec.varlen else "B"
        self.packing = ["cu_seqlens"] if self.spec.varlen else []
        self.tensors = ["q", "k", "v", *plan.buffers]

    def label(self, name: str) -> str:
        """Return the name of a buffer for callers."""
        return self.called.get(name, name)

    @property
    def scale(self) -> str:
        """The default of `scale`."""
        return f"{self.K} ** -0.5" if self.spec.scale is None else repr(float(self.spec.scale))

    def signature(self, *, decode: bool = False) -> Signature:
        """Return the parameters of a function."""
        required = (*map(self.label, self.plan.buffers), *self.packing)
        scale = (("scale", "None"),)
        if decode:
            return Signature(("q", "k", "v", "state"), required, (*scale, ("states", "None")))
        asked = (("output_final_state", "False"), ("return_states", "False"))
        ends = (("initial_state", "None"), *asked)
        return Signature(("q", "k", "v"), required, (*scale, *ends))

    def shapes(self) -> dict[str, str]:
        """Return the shapes of arguments, as Python tuples."""
        sizes = {"T": "B, T", "HV": "HV", "K": str(self.K), "V": str(self.V)}
        found = {
            name: ", ".join(sizes[size] for size in self.spec.buffers[name].shape)
            for name in self.plan.buffers
        }
        state = f"{self.sequences}, HV, {self.K}, {self.V}"
        found |= {"q": f"B, T, H, {self.K}", "k": f"B, T, H, {self.K}"}
        found["states"] = f"B, T, HV, {self.K}, {self.V}"
        found |= {"v": f"B, T, HV, {self.V}", "initial_state": state, "state": state}
        return {
            n: f"({shape},)" if "," not in shape else f"({shape})" for n, shape in found.items()
        }

    def dtypes(self) -> dict[str, str]:
        """Return the dtypes of the tensors that are cast under autocast, and of states."""
        found: dict[str, str] = dict.fromkeys(("q", "k", "v"), self.spec.dtype)
        found |= {name: self.spec.buffers[name].dtype for name in self.plan.buffers}
        found |= dict.fromkeys(("initial_state", "state"), self.spec.state_dtype)
        return {name: f"torch.{TORCH_DTYPES[dtype]}" for name, dtype in found.items()}

    def derivatives(self, *, decode: bool = False) -> Derivatives:
        """Return the derivatives of a function."""
        real = [*self.tensors, *(STEPPED if decode else ("initial_state",))]
        if decode:
            refused = dict.fromkeys(real, NO_BACKWARD)
        elif not self.plan.backward:
            refused = dict.fromkeys(real, NOT_ASKED_FOR)
        else:
            trees = [formula.tree for formula in self.plan.formulas.values()]
            learnable = {n for tree in trees for n in differentiable(tree)}
            refused = {
                n: NOT_LEARNED if self.label(n) in learnable or n in learnable else NO_DERIVATIVE
                for n in self.plan.buffers
                if n not in self.plan.learned
            }
        derived = self.plan.backward and not decode
        return derivatives_of(real, refused, derived=derived, called=self.called)

    def arguments(self, name: str, *, decode: bool = False) -> Arguments:
        """Return the checks of a function."""
        dtypes, states = self.dtypes(), STEPPED if decode else ("initial_state",)
        allowed = {n: f"[{dtype}]" for n, dtype in dtypes.items()}
        allowed["states"] = "[torch.float32, torch.bfloat16]"
        dims = {n: shape.count(",") + (shape[-2:] != ",)") for n, shape in self.shapes().items()}
        given = [*self.tensors, *states]
        renamed = {n: self.label(n) for n in self.plan.buffers if self.label(n) != n}
        return Arguments(
            name=name,
            assigned=[f"{inner} = {label}" for inner, label in renamed.items()],
            dense_check=dense(name, [*given, *self.packing]),
            casts=cast_lines({n: dtypes[n] for n in given if n not in STEPPED}),
            tensors=[f'("{self.label(n)}", {n}, {dims[n]}, {allowed[n]})' for n in given],
            optional=states[-1],
            checks=[*self._sizes(), *self._shapes(states), *self._strides(decode)],
            varlen=self.spec.varlen,
            derivatives=self.derivatives(decode=decode),
            scale=self.scale,
        )

    def _sizes(self) -> list[Check]:
        heads, found = self.spec.heads, list[Check]()
        if heads.qk:
            message = f"q must have {heads.qk} heads and v {heads.v}, got {{H}} and {{HV}}"
            found.append(Check(f"(H, HV) != ({heads.qk}, {heads.v})", message))
        elif heads.group:
            many = (
                f"{heads.group} heads for each head of" if heads.group > 1 else "as many heads as"
            )
            message = f"v must have {many} q, got {{HV}} and {{H}}"
            found.append(Check(f"HV != {heads.group} * H", message))
        else:
            message = "the number of heads of v must be a multiple of that of q, got {HV} and {H}"
            found.append(Check("H == 0 or HV % H", message))
        if self.spec.varlen:
            found.append(Check("B != 1", "packed sequences need B = 1, got {B}"))
        return found

    def _shapes(self, states: tuple[str, ...]) -> list[Check]:
        shapes, found = self.shapes(), list[Check]()
        for name in (*self.tensors, *states):
            shape, label = shapes[name], self.label(name)
            wrong = f"{name}.shape != {shape}"
            if name == states[-1]:
                wrong = f"{name} is not None and {wrong}"
            message = f"{label} must be {{list({shape})}}, got {{list({name}.shape)}}"
            found.append(Check(wrong, message))
        return found

    def _strides(self, decode: bool) -> list[Check]:
        """Return the checks that strides are small: kernels multiply positions in a chunk, and
        rows and columns, by strides in 32 bits.
        """
        rows = "strides between rows and columns of a state must be less than 2**23"
        stepped = f"max(max(x.stride()[-2:]) for x in ({', '.join(STEPPED)}) if x is not None)"
        tokens = ["q", "k", "v", *(n for n in self.plan.buffers if self.spec.buffers[n].tokens)]
        return [
            Check(
                f"max(x.stride(1) for x in ({', '.join(tokens)})) >= 2**24",
                "strides between tokens must be less than 2**24: make the tensors contiguous",
            ),
            Check(
                f"max(x.stride(-1) for x in ({', '.join(self.tensors)})) >= 2**23",
                (
                    "strides between elements of a row must be less than 2**23: make the tensors "
                    "contiguous"
                ),
            ),
            *([Check(f"{stepped} >= 2**23", f"{rows}: make it contiguous")] if decode else []),
        ]

    def docstring(self, *, decode: bool = False) -> Docstring:
        """Return the part of a function's docstring on arguments and results."""
        spec = self.spec
        learned = [*("q", "k", "v"), *map(self.label, self.plan.learned)]
        words = f"Differentiable in {', '.join(learned)} and initial_state."
        return Docstring(
            K=self.K,
            V=self.V,
            BT=spec.chunk_size,
            least=spec.chunk_size - 1,
            dtype=TORCH_DTYPES[spec.dtype],
            state_dtype=TORCH_DTYPES[spec.state_dtype],
            head_words=self.head_words(),
            buffer_words=[self._buffer_words(n) for n in self.plan.buffers],
            sequences=self.sequences,
            varlen=spec.varlen,
            decodes=decode,
            scale=self.scale.replace(f"{self.K} ** -0.5", f"1 / sqrt({self.K})"),
            grad_words=words if self.plan.backward and not decode else None,
            derivatives=self.derivatives(decode=decode),
        )

    def head_words(self) -> str:
        """Return the rule of the numbers of heads."""
        heads = self.spec.heads
        if heads.qk:
            return f"H is {heads.qk}, HV {heads.v}"
        return f"HV is {heads.group} * H" if heads.group else "HV is a multiple of H"

    def _buffer_words(self, name: str) -> str:
        buffer = self.spec.buffers[name]
        sizes = ["B", *buffer.shape] if buffer.tokens else [*buffer.shape]
        users = [
            field
            for field, formula in self.plan.formulas.items()
            if name in formula.read or name in buffers_of(formula.tree)
        ]
        used = f", used by {' and '.join(users)}"
        return f"{self.label(name)}: [{', '.join(sizes)}] {TORCH_DTYPES[buffer.dtype]}{used}."
