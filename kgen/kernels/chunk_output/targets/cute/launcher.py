"""The launcher of chunk_output in CuTe DSL, and the array of numbers that it passes to
`_launch`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.chunk_output.plan.planning import ChunkOutputPlan
from kgen.kernels.chunk_output.spec import ChunkOutputSpec
from kgen.kernels.chunk_output.targets.cute import words
from kgen.kernels.chunk_output.targets.interface import casts, inputs, packing, signature
from kgen.targets import opening
from kgen.targets.arguments import (
    IN_ANOTHER_FILE,
    NOT_ASKED_FOR,
    Derivatives,
    dense,
    derivatives_of,
)
from kgen.targets.code import CUTE
from kgen.targets.template import Template
from kgen.targets.triton.text import TORCH_DTYPES

ELEMENTS = {"fp32": "Float32", "bf16": "BFloat16", "fp16": "Float16"}
MOVED = ("q", "k", "v", "h", "o")
"""The tensors with 16-byte alignment, because TMA moves them. Stores of o without TMA also move 16
bytes.
"""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a launch. The array of numbers has its address and leading strides."""

    name: str
    element: str
    vector: int
    """Address and strides are multiples of this number of elements."""
    shape: list[str]
    """The sizes of the dims, in the order of the kernel."""
    behind: list[str]
    """By dim, the offset from the address to the stride in the array; 0 for stride 1."""
    strides: int
    """The number of strides after the address: those of the leading dims of the caller's tensor."""
    at: int
    """The index of the address in the array."""


@dataclass(frozen=True)
class LaunchNumbers:
    """The sizes and tensors of a launch, which `_launch` gets as one array of int64."""

    names: list[str]
    """The names of the sizes in `_launch`."""
    given: list[str]
    """The sizes as expressions in the operator."""
    tensors: list[Tensor]

    @property
    def passed(self) -> list[str]:
        """The tensors that the operator passes, copied if TMA cannot load them."""
        read = [name for name in MOVED if name != "o"]
        return [f"_for_tma({x.name})" if x.name in read else x.name for x in self.tensors]

    @property
    def strides(self) -> list[int]:
        """The number of strides of each tensor."""
        return [tensor.strides for tensor in self.tensors]

    @property
    def n_sizes(self) -> int:
        """The number of sizes."""
        return len(self.names)

    @property
    def count(self) -> int:
        """The length of the array."""
        return self.n_sizes + sum(1 + strides for strides in self.strides)


@dataclass(frozen=True)
class Docstring(Template):
    """The part of the function's docstring on arguments and results."""

    template: ClassVar[str] = "chunk_output/cute/_docstring.j2"

    argument_words: list[str]
    v: int
    derivatives: Derivatives


@dataclass(frozen=True)
class Checked:
    """The dtype and shape that a tensor must have."""

    name: str
    shape: list[str]
    dtype: str

    @property
    def dims(self) -> int:
        """The number of dimensions."""
        return len(self.shape)


@dataclass(frozen=True)
class Launcher(Template):
    """The launcher of a file."""

    template: ClassVar[str] = "chunk_output/cute/_launcher.j2"
    language: ClassVar[str] = CUTE

    name: str
    summary: str
    docstring: Docstring
    signature: str
    k: int
    varlen: bool
    variant: list[str]
    """Constants of the compiled kernel, in addition to the index type and the numbers of heads."""
    index_type: str
    default_heads: int
    default_group: int
    numbers_of_launch: LaunchNumbers
    operands: list[str]
    """The tensors of the operator; its last operand is `scale`."""
    parameters: str
    """All operands with their types, on one line or two."""
    derivatives: Derivatives
    dense_check: str
    casts: list[str]
    checked: list[Checked]
    wrong_heads: str
    heads_words: str

    def launch_functions(self) -> Iterable[str]:
        names = ("_cast", "_dense", "_library", "_operator", "_real")
        return (*names, *self.derivatives.launch_functions())


def launcher(plan: ChunkOutputPlan) -> Launcher:
    """Return the launcher of a plan."""
    spec = plan.spec
    operands = [*inputs(plan), *packing(spec)]
    return Launcher(
        name=spec.name,
        summary=opening(spec),
        docstring=docstring(plan),
        signature=str(signature(plan)),
        k=spec.head_dim.qk,
        varlen=spec.varlen,
        variant=["given"] if spec.varlen else [],
        index_type="Int64 if cu_seqlens.dtype == torch.int64 else Int32"
        if spec.varlen
        else "Int32",
        default_heads=spec.heads.qk or 16,
        default_group=spec.heads.ratio or 2,
        numbers_of_launch=launch_numbers(plan),
        operands=operands,
        parameters=_parameters(plan),
        derivatives=_derivatives(plan),
        dense_check=dense(spec.name, operands),
        casts=casts(plan),
        checked=_checked(plan),
        wrong_heads=_wrong_heads(spec),
        heads_words=words.heads(plan),
    )


def docstring(plan: ChunkOutputPlan) -> Docstring:
    """Return the part of the function's docstring on arguments and results."""
    return Docstring(words.argument_words(plan), plan.spec.head_dim.v, _derivatives(plan))


def launch_numbers(plan: ChunkOutputPlan) -> LaunchNumbers:
    """Return the sizes and tensors of a launch."""
    spec = plan.spec
    sizes = {"batches": "B", "tokens": "T", "n_chunks": "B * NT", "ctas": "ctas"}
    if spec.varlen:
        sizes["sequences"] = "cu_seqlens.shape[0] - 1"
    found, at = list[Tensor](), len(sizes)
    for name, (shape, behind) in _layouts(plan).items():
        element = ELEMENTS[spec.gate_dtype if name in plan.gates else spec.dtype]
        found.append(
            Tensor(
                name=name,
                element="index" if name in packing(spec) else element,
                vector=8 if name in MOVED else 1,
                shape=shape,
                behind=[str(place) for place in behind],
                strides=max(behind),
                at=at,
            )
        )
        at += 1 + found[-1].strides
    return LaunchNumbers(list(sizes), list(sizes.values()), found)


def _layouts(plan: ChunkOutputPlan) -> dict[str, tuple[list[str], list[int]]]:
    """Return the layouts in kernels by name: the dims, and for each the offset from the address to
    its stride.

    The strides of the caller's first dims follow the address in their order.
    """
    spec = plan.spec
    v_tokens = "n_chunks // batches * BT" if spec.v_layout == "chunk_padded" else "tokens"
    state = [4, 0, 3, 2, 1] if spec.state_layout == "vk" else [0, 4, 3, 2, 1]
    layouts = {
        "q": (["tokens", "K", "H", "batches"], [2, 0, 3, 1]),
        "k": (["tokens", "K", "H", "batches"], [2, 0, 3, 1]),
        "v": (["V", v_tokens, "H * GROUP", "batches"], [0, 2, 3, 1]),
        "h": (["V", "K", "H * GROUP", "n_chunks // batches", "batches"], state),
        "o": (["tokens", "V", "H * GROUP", "batches"], [2, 0, 3, 1]),
        "g": (["tokens", "H * GROUP", "batches"], [2, 3, 1]),
        "g_gamma": (["H * GROUP"], [1]),
        "cu_seqlens": (["sequences + 1"], [0]),
        "chunk_indices": (["n_chunks", "2"], [1, 0]),
    }
    return {name: layouts[name] for name in (*MOVED, *plan.gates, *packing(spec))}


def _parameters(plan: ChunkOutputPlan) -> str:
    tensors = ", ".join(f"{name}: Tensor" for name in inputs(plan))
    if plan.spec.varlen:
        return f"{tensors},\ncu_seqlens: Tensor, chunk_indices: Optional[Tensor], scale: float"
    return f"{tensors}, scale: float"


def _derivatives(plan: ChunkOutputPlan) -> Derivatives:
    reason = IN_ANOTHER_FILE if plan.backward else NOT_ASKED_FOR
    return derivatives_of(inputs(plan), dict.fromkeys(inputs(plan), reason), derived=False)


def _checked(plan: ChunkOutputPlan) -> list[Checked]:
    spec = plan.spec
    shapes = {
        "q": ["B", "T", "H", "K"],
        "k": ["B", "T", "H", "K"],
        "v": ["B", "NT * BT" if spec.v_layout == "chunk_padded" else "T", "HV", "V"],
        "h": ["B", "NT", "HV", *spec.state_layout.upper()],
        "g": ["B", "T", "HV"],
        "g_gamma": ["HV"],
    }
    return [
        Checked(
            name, shapes[name], TORCH_DTYPES[spec.gate_dtype if name in plan.gates else spec.dtype]
        )
        for name in inputs(plan)
    ]


def _wrong_heads(spec: ChunkOutputSpec) -> str:
    heads = spec.heads
    if heads.qk:
        return f"(H, HV) != ({heads.qk}, {heads.v})"
    return f"HV != {heads.group} * H" if heads.group else "H == 0 or HV % H"
