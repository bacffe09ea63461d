"""The data of the templates in `templates/attention/c`: the functions of attention in C."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.plan.block_mask import BLOCK_SIZE, BlockMask
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.targets.triton.native_learned import LearnedCalls
from kgen.kernels.attention.targets.triton.native_tensors import Tensors
from kgen.kernels.attention.targets.triton.placement import Placement
from kgen.spec.load import Loaded
from kgen.targets.native import Check, Header, Program, Tensor, Tiles
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
    """The first of the names that kernels have for the strides of a tensor: `g` is dO, `o` is out,
    dq or dk.
    """

    q: str
    k: str
    v: str
    g: str
    o: str
    w: str
    l: str  # noqa: E741


@dataclass(frozen=True)
class Tiled:
    """A descriptor: the tiles of a tensor of C, and its place among those of a launch."""

    name: str
    tensor: str
    rows: str
    columns: int
    at: int


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
    planes = " * ".join(
        [*(["p->B"] if mask.by_batch else []), *(["p->HQ"] if mask.by_head else [])]
    )
    return BlockMaskCalls(name, planes or "1", "q_blocks + kv_blocks" if backward else "q_blocks")


@dataclass(frozen=True)
class Way:
    """A way through the forward pass."""

    call: str
    """The call that launches its kernels."""
    serves: str = ""
    """The function that is true for its calls. Empty for the last way."""


@dataclass(frozen=True)
class ForwardCalls(Template):
    """The forward pass."""

    template: ClassVar[str] = "attention/c/_forward.j2"

    name: str
    first: FirstStrides
    lse: Tensor
    sinks: bool
    functions: list[Template]
    """The functions that launch kernels, and say when."""
    workspace: list[Template]
    """The lines that find how much of a workspace a call takes."""
    ways: list[Way]
    """All ways but the last."""
    last: Way


@dataclass(frozen=True)
class ChipCalls:
    """The backward pass on one chip with kernels of its own."""

    flag: str
    """The member of a problem that is true if these kernels can run."""
    arch: int
    when: str
    """The condition under which they serve."""
    call: str
    """The call that launches them, from delta on."""
    serves: Template
    """The function that finds whether they serve."""
    planned: Template
    """The lines that give them their workspace."""
    launch: Template
    """The function that launches them."""
    zeros: list[Template]
    """The lines that clear the tensors to which they add."""
    dq: bool
    """True where dq has a kernel for the chip."""
    counts: bool
    """True if the kernel of delta resets the counters of their tiles."""


@dataclass(frozen=True)
class Prepared:
    """A spec, planned and lowered for C."""

    loaded: Loaded
    plan: AttentionPlan
    free_plan: AttentionPlan
    """The plan without promises on lengths, for kernels whose loads end with the tensor."""
    chips: Collection[int]
    """The chips that there is machine code for."""
    lowering: Lowering
    free_lowering: Lowering
    at: Placement
    tensors: Tensors
    first: FirstStrides


@dataclass(frozen=True)
class Calls:
    """The parts of a schedule that call its kernels from C."""

    functions: tuple[Template, ...] = ()
    late: bool = False
    """True if the functions call those of schedules behind this one."""
    workspace: tuple[Template, ...] = ()
    way: Way | None = None
    chip: ChipCalls | None = None
    launches: Mapping[str, PortableLaunch] = field(default_factory=dict)
    """The launches of the backward pass that every chip has."""
    learned: LearnedCalls | None = None
    descs: tuple[str, ...] = ()
    """The names of descriptors other than the descriptors of q, k, v and dout."""
    names: tuple[str, ...] = ()
    """The names of further arguments."""
    tiles: tuple[Tiles, ...] = ()
    tiled: bool = False
    """True where TMA has tiles."""
    portable: bool = False
    """True where a launch looks its tile up by the chip and the tensors."""
    decodes: bool = False


@dataclass(frozen=True)
class Vectors:
    """The vectors of the backward pass, with a number for each query of each head."""

    packed: bool

    @property
    def rows(self) -> str:
        """How many numbers a vector has."""
        return "p->HQ * p->TQ" if self.packed else "p->B * p->HQ * p->SQ"

    @property
    def programs(self) -> str:
        """How many programs the kernel of delta has."""
        return (
            "kgen_cdiv(p->TQ, 64) * p->HQ" if self.packed else "kgen_cdiv(p->SQ, 64) * p->B * p->HQ"
        )

    @property
    def sink_parts(self) -> str:
        """How many numbers the gradients of sinks have."""
        return (
            "p->HQ * kgen_cdiv(p->TQ, 64)" if self.packed else "p->B * p->HQ * kgen_cdiv(p->SQ, 64)"
        )


@dataclass(frozen=True)
class BackwardCalls(Template):
    """The backward pass."""

    template: ClassVar[str] = "attention/c/_backward.j2"

    name: str
    first: FirstStrides
    lse: Tensor
    vectors: Vectors
    sinks: bool
    group: int
    """Heads that programs take at a time."""
    chips: list[ChipCalls]
    dq: PortableLaunch
    dkdv: PortableLaunch
    learned: LearnedCalls | None

    @property
    def zeros(self) -> list[Template]:
        """The lines that clear the tensors to which kernels for a chip add."""
        return [lines for chip in self.chips for lines in chip.zeros]

    @property
    def starts_next(self) -> str:
        """The condition that the next kernel starts before the kernel of delta ends."""
        return _any(self.chips) or "0"

    @property
    def recomputes(self) -> bool:
        """True where there are kernels for gradients alone."""
        return self.learned is not None and bool(self.learned.recomputed)

    @property
    def counters_or_none(self) -> str:
        """The counters that delta's kernel leaves at zero."""
        counting = [chip for chip in self.chips if chip.counts]
        if not counting:
            return "kgen_nothing()"
        pointer = "kgen_pointer(workspace + m->counters, KGEN_I32)"
        return f"{_any(counting)} ? {pointer} : kgen_nothing()"


def _any(chips: Sequence[ChipCalls]) -> str:
    """Return the condition that the kernels of any of these chips run."""
    return " || ".join(f"p->{chip.flag}" for chip in chips)


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
    """The sizes that kernels take as arguments."""
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
    flags: list[str]
    """The members of a problem that are true if the kernels for a chip can run in the backward
    pass.
    """
    parts: list[Template]
    """The passes."""

    @property
    def queries(self) -> str:
        """The length that queries have in common."""
        return "TQ" if self.packed else "SQ"

    @property
    def keys(self) -> str:
        return "TK" if self.packed else "SK"
