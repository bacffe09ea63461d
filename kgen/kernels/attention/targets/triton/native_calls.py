"""The functions of attention in C: what the templates of `templates/attention/c` print."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.attention.lowered.model import Operands
from kgen.kernels.attention.plan.block_mask import BLOCK_SIZE, BlockMask
from kgen.kernels.attention.schedules.decode.plan import MOST_QUERIES, DecodePlan
from kgen.kernels.attention.schedules.hopper.native import HopperBackward, HopperForward, Tiled
from kgen.kernels.attention.targets.triton.native_learned import LearnedCalls
from kgen.kernels.attention.targets.triton.native_tensors import Tensors
from kgen.targets.native import Check, Header, Program, Tensor
from kgen.targets.template import Template


@dataclass(frozen=True, kw_only=True)
class AttentionHeader(Header):
    """The header: the struct of arguments, and the functions."""

    template: ClassVar[str] = "attention/c/attention.h.j2"

    tensors: Tensors
    width: int
    """Columns of a query."""
    backward: bool
    sinks: bool


@dataclass(frozen=True)
class FirstStrides:
    """The first of the names that kernels have for the strides of a tensor: `g` is dO, `o` is out, dq or dk."""

    q: str
    k: str
    v: str
    g: str
    o: str
    w: str
    l: str  # noqa: E741


@dataclass(frozen=True)
class PortableLaunch:
    """The launch of a kernel for every chip that loops over tiles."""

    by_tma: str
    """When TMA can load them."""
    descs: tuple[Tiled, ...]
    tiles: int
    """Descriptors of the launch that has most."""


@dataclass(frozen=True)
class BlockMaskCalls(Template):
    """The call that fills lists of blocks."""

    template: ClassVar[str] = "attention/c/_block_mask.j2"

    name: str
    planes: str
    rows: str
    """Lists of a plane."""
    size: int = BLOCK_SIZE
    group: int = 8
    """The blocks of a program of the kernel that makes them, as from Python."""
    chunk: int = 256


def block_mask_calls(mask: BlockMask, name: str, backward: bool) -> BlockMaskCalls:
    """The call that fills the lists of a mask."""
    planes = " * ".join([*(["p->B"] if mask.by_batch else []), *(["p->HQ"] if mask.by_head else [])])
    return BlockMaskCalls(name, planes or "1", "q_blocks + kv_blocks" if backward else "q_blocks")


@dataclass(frozen=True)
class DecodeCalls(Template):
    """The functions of calls with few queries."""

    template: ClassVar[str] = "attention/decode/_calls.j2"

    when: str
    """The condition of a call that decodes."""
    balanced: bool
    width: int
    """Columns of a value."""
    lse: Tensor


def decode_calls(plan: DecodePlan, width: int, lse: Tensor, on_hopper: bool) -> DecodeCalls:
    """The functions of calls with few queries; `on_hopper` says whether a kernel for Hopper takes many."""
    when = f"p->SQ <= {MOST_QUERIES}"
    if plan.alone:
        when = f"{when} || !forward_on_hopper(a, p)" if on_hopper else "1"
    return DecodeCalls(when, plan.balanced, width, lse)


@dataclass(frozen=True)
class ForwardCalls(Template):
    """The forward pass."""

    template: ClassVar[str] = "attention/c/_forward.j2"

    name: str
    first: FirstStrides
    lse: Tensor
    paged: bool
    sinks: bool
    group: int
    """Heads that programs take at a time."""
    hopper: HopperForward | None
    portable: PortableLaunch | None
    decode: DecodeCalls | None

    @property
    def always_decodes(self) -> bool:
        """True where every call decodes."""
        return self.portable is None and self.hopper is None

    @property
    def counts(self) -> bool:
        """True where a kernel counts its tiles."""
        return self.hopper is not None and self.hopper.dynamic


@dataclass(frozen=True)
class BackwardCalls(Template):
    """The backward pass."""

    template: ClassVar[str] = "attention/c/_backward.j2"

    name: str
    first: FirstStrides
    lse: Tensor
    packed: bool
    sinks: bool
    group: int
    """Heads that programs take at a time."""
    hopper: HopperBackward | None
    dq: PortableLaunch
    dkdv: PortableLaunch
    learned: LearnedCalls | None

    @property
    def dq_on_hopper(self) -> bool:
        """True where dq has a kernel for Hopper."""
        return self.hopper is not None and self.hopper.dq is not None

    @property
    def fused(self) -> bool:
        """True where one kernel may have dq, dk and dv."""
        return self.hopper is not None and self.hopper.fused is not None

    @property
    def recomputes(self) -> bool:
        """True where there are kernels for gradients alone."""
        return self.learned is not None and bool(self.learned.recomputed)

    @property
    def rows(self) -> str:
        """How many numbers a vector has."""
        return "p->HQ * p->TQ" if self.packed else "p->B * p->HQ * p->SQ"

    @property
    def delta_programs(self) -> str:
        return "kgen_cdiv(p->TQ, 64) * p->HQ" if self.packed else "kgen_cdiv(p->SQ, 64) * p->B * p->HQ"

    @property
    def sink_parts(self) -> str:
        """How many numbers the gradients of sinks have."""
        return "p->HQ * kgen_cdiv(p->TQ, 64)" if self.packed else "p->B * p->HQ * kgen_cdiv(p->SQ, 64)"

    @property
    def counters_or_none(self) -> str:
        """The counters that delta's kernel leaves at zero."""
        if self.hopper is None or not self.hopper.dynamic:
            return "kgen_nothing()"
        return "p->on_hopper ? kgen_pointer(workspace + m->counters, KGEN_I32) : kgen_nothing()"


@dataclass(frozen=True, kw_only=True)
class AttentionProgram(Program):
    """The functions."""

    template: ClassVar[str] = "attention/c/attention.c.j2"

    tensors: Tensors
    first: FirstStrides
    packed: bool
    grouped: bool
    paged: bool
    backward: bool
    dims: int
    """Dimensions of a tensor of rows."""
    dtype: str
    bytes: int
    default_scale: str
    programs_of_queries: str
    programs_of_keys: str | None
    plain: list[str]
    """The sizes that kernels are given."""
    sizes: list[str]
    checks: list[Check]
    aligned: list[str]
    """The members with narrow values, which have to be aligned."""
    aligned_backward: list[str]
    tiled: bool
    """True where TMA has tiles."""
    portable: bool
    decodes: bool
    pairs: bool
    diagonals: bool
    parts: list[Template]
    """The passes."""

    @property
    def queries(self) -> str:
        """The length that queries have in common."""
        return "TQ" if self.packed else "SQ"

    @property
    def keys(self) -> str:
        return "TK" if self.packed else "SK"


def portable_launches(loops: dict[str, Operands]) -> dict[str, PortableLaunch]:
    """The launches of the kernels for every chip, by what they compute."""
    most = max((len(of.descriptors) for of in loops.values()), default=0)
    return {
        name: PortableLaunch(
            by_tma=" && ".join(f"by_tma(&a->{x})" for x in of.tensors),
            descs=tuple(
                Tiled(d.name, d.tensor, d.rows, d.columns, at) for at, d in enumerate(of.descriptors)
            ),
            tiles=most,
        )
        for name, of in loops.items()
    }
