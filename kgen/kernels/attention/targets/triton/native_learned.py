"""Gradients of learned buffers from C: the partial sums of kernels, and the kernels for these
gradients only.

Without PyTorch, the caller reduces the partial sums. A call writes them to the caller's tensors,
and the header explains the element of each number. For a buffer with an element per pair, the
tensor is the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

from kgen.kernels.attention.plan.model import AttentionPlan, ReadGradient
from kgen.kernels.attention.plan.tuned import Tile
from kgen.kernels.attention.targets.triton.native_tensors import LETTERS, GradientTensor
from kgen.targets.code import Code
from kgen.targets.native import Tiles, in_struct
from kgen.targets.native_reference import in_cpp
from kgen.targets.template import Template
from kgen.targets.triton import tables

TABLES = {"pair": ("BLOCK_M", "BLOCK_N"), "diagonal": ("BLOCK",)}
"""The names of tile sizes, for kernels that compute only gradients of buffers."""


@dataclass(frozen=True)
class Launched:
    """A kernel that computes only the gradient of a buffer."""

    name: str
    times: str | None
    """Number of programs per tile of queries and keys. None for one."""


@dataclass(frozen=True)
class LearnedCalls(Template):
    """The C functions for gradients of buffers in the backward pass."""

    template: ClassVar[str] = "attention/c/_learned.j2"

    tensors: tuple[GradientTensor, ...]
    pairs: list[Launched]
    diagonals: list[Launched]

    @property
    def recomputed(self) -> list[Launched]:
        """All kernels that compute only gradients of buffers."""
        return [*self.pairs, *self.diagonals]


def learned_calls(
    tensors: tuple[GradientTensor, ...],
    pairs: Sequence[tuple[str, Code | None]],
    diagonals: Sequence[str],
) -> LearnedCalls | None:
    """Return the C functions for the gradients of these tensors, or None without any.

    `pairs` are kernels per (query, key), with their programs per tile. `diagonals` are kernels per
    distance.
    """
    if not tensors:
        return None
    of_pairs = [
        Launched(name, None if programs is None else in_struct(programs, "p->"))
        for name, programs in pairs
    ]
    return LearnedCalls(tensors, of_pairs, [Launched(name, None) for name in diagonals])


def learned_names(plan: AttentionPlan) -> list[str]:
    """Return the kernel names of these tensors and of their strides."""
    names = [f"d_{g.name}_ptr" for g in plan.gradients]
    names += [f"stride_d_{g.name}_{i}" for g in plan.gradients for i in range(len(g.indices))]
    return [*names, "BLOCK"]


def learned_tables(plan: AttentionPlan) -> list[Tiles]:
    """Return the tile tables of kernels that compute only gradients of buffers."""
    loops = {"pair": plan.pairs, "diagonal": plan.diagonals}
    found: dict[str, Mapping[int, Sequence[Tile]]] = {
        "pair": plan.tiles.pair,
        "diagonal": plan.tiles.diagonal,
    }
    return [
        Tiles(
            f"{kind}_tiles",
            [(chips, _tile(tile, TABLES[kind])) for chips, tile in tables.rows(found[kind])],
            kernel=f"_d_{loops[kind][0].gradients[0].name}_kernel",
            struct=f"{kind}_tile",
        )
        for kind in TABLES
        if loops[kind]
    ]


def _tile(tile: Tile, sizes: Sequence[str]) -> dict[str, int | bool]:
    fields = asdict(tile)
    blocks = dict(zip(sizes, (fields["BLOCK_M"], fields["BLOCK_N"]), strict=False))
    return blocks | {name: fields[name] for name in ("num_warps", "num_stages")}


# --- the example ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summand:
    """A gradient tensor that a call writes, and its reduction in the example."""

    member: str
    whole: bool
    """True if the tensor is the gradient."""
    element: list[str]
    """The indices of the element to which a number is added."""
    count: str = ""
    """Number of elements per row."""
    step: str = ""
    """The position of a number within its row."""
    at: str = ""
    """The index of the number in the tensor."""


@dataclass(frozen=True)
class Learned:
    """A buffer with a gradient."""

    buffer: str
    sizes: tuple[str, ...]
    parts: list[Summand]


def learned_example(
    plan: AttentionPlan,
    tensors: Sequence[GradientTensor],
    names: Mapping[str, str],
    sizes: Mapping[str, tuple[str, ...]],
) -> tuple[list[Learned], dict[str, tuple[str, ...]]]:
    """Return the buffers with a gradient, and the sizes of the tensors that a call writes, by
    member. `names` are C++ names of positions, and `sizes` are the sizes of buffers.
    """
    found: dict[str, list[Summand]] = {}
    left: dict[str, tuple[str, ...]] = {}
    for g, tensor in zip(plan.gradients, tensors, strict=True):
        # The distance is between the query and key 0.
        indices = [in_cpp(i, {**names, "distance": "at.q_idx"}) for i in g.indices]
        element = [f"int64_t({i})" for i in indices]
        summand, shape = _summand(tensor.member, element, g, plan.spec.varlen)
        found.setdefault(tensor.of_buffer, []).append(summand)
        left[tensor.member] = shape or sizes[tensor.of_buffer]
    return [Learned(buffer, sizes[buffer], parts) for buffer, parts in found.items()], left


def _summand(
    member: str, element: list[str], g: ReadGradient, packed: bool
) -> tuple[Summand, tuple[str, ...] | None]:
    """Return a summand and the shape of its tensor, or None for the shape of the buffer."""
    if g.along == "pair":
        shape = None if g.summed is None else tuple(f"sizes.{LETTERS[n]}" for n in g.summed)
        return Summand(member, True, element), shape
    if g.along == "distance":
        summand = Summand(
            member, False, element, "at.SQ + at.SK", "at.q_idx = i - at.SK", "b, h, i"
        )
        return summand, ("sizes.B", "sizes.HQ", "sizes.SQ + sizes.SK")
    position, length = ("q_idx", "SQ") if g.along == "q" else ("kv_idx", "SK")
    at = "h, ends[size_t(b)] + i" if packed else "b, h, i"
    shape = ("sizes.HQ", "ends.back()") if packed else ("sizes.B", "sizes.HQ", f"sizes.{length}")
    return Summand(member, False, element, f"at.{length}", f"at.{position} = i", at), shape
