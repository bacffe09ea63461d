"""The data of the templates in `templates/attention/c`: the functions of attention in C."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.lowered.row_max import RowResults
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
    """The C header: the struct of arguments, and the function declarations."""

    template: ClassVar[str] = "attention/c/attention.h.j2"

    tensors: Tensors
    width: int
    """Columns of Q."""
    backward: bool
    sinks: bool


@dataclass(frozen=True)
class FirstStrides:
    """The name of the first stride of each tensor."""

    q: str
    k: str
    v: str
    o: str
    do: str
    dq: str
    dk: str
    dv: str
    dlse: str


@dataclass(frozen=True)
class Tiled:
    """A TMA descriptor: the tiles of a C tensor, and its index in a launch."""

    name: str
    tensor: str
    rows: str
    columns: int
    at: int


@dataclass(frozen=True)
class PortableLaunch:
    """The launch of a portable kernel that loops over tiles."""

    by_tma: str
    """The condition under which TMA can load the tiles."""
    descs: tuple[Tiled, ...]
    tiles: int
    """Maximum number of descriptors of a launch."""


@dataclass(frozen=True)
class BlockMaskCalls(Template):
    """The C function that fills lists of blocks."""

    template: ClassVar[str] = "attention/c/_block_mask.j2"

    name: str
    planes: str
    rows: str
    """Number of lists per plane."""
    size: int = BLOCK_SIZE
    group: int = 8
    """Number of blocks per program of the kernel that fills lists, as in the Python launcher."""
    chunk: int = 256


def block_mask_calls(mask: BlockMask, name: str, backward: bool) -> BlockMaskCalls:
    """Return the C function that fills the lists of a mask."""
    planes = " * ".join(
        [*(["p->B"] if mask.by_batch else []), *(["p->HQ"] if mask.by_head else [])]
    )
    return BlockMaskCalls(name, planes or "1", "q_blocks + kv_blocks" if backward else "q_blocks")


@dataclass(frozen=True)
class Way:
    """A branch of the forward pass."""

    call: str
    """The C call that launches its kernels."""
    serves: str = ""
    """The name of the C predicate for its calls. Empty for the last branch."""


@dataclass(frozen=True)
class ForwardCalls(RowResults, Template):
    """The forward pass."""

    template: ClassVar[str] = "attention/c/_forward.j2"

    name: str
    first: FirstStrides
    lse: Tensor
    sinks: bool
    functions: list[Template]
    """The C functions that launch kernels, and the predicates of their calls."""
    workspace: list[Template]
    """The statements that compute the workspace size of a call."""
    ways: list[Way]
    """All branches except the last."""
    last: Way


@dataclass(frozen=True)
class ChipCalls:
    """The backward kernels for one chip."""

    flag: str
    """The member of a problem that is true if these kernels can run."""
    arch: int
    when: str
    """The condition under which these kernels run."""
    call: str
    """The C call that launches them, beginning with delta."""
    serves: Template
    """The C predicate of their calls."""
    planned: Template
    """The statements that assign their workspace."""
    launch: Template
    """The C function that launches them."""
    zeros: list[Template]
    """The statements that clear the tensors to which the kernels add."""
    dq: bool
    """True if the chip has its own dq kernel."""
    counts: bool
    """True if the delta kernel resets the tile counters of these kernels."""


@dataclass(frozen=True)
class Prepared:
    """A spec, planned and lowered for C."""

    loaded: Loaded
    plan: AttentionPlan
    free_plan: AttentionPlan
    """The plan without length promises, for kernels whose loads stop at the end of the tensor."""
    chips: Collection[int]
    """The compute capabilities that have machine code."""
    lowering: Lowering
    free_lowering: Lowering
    at: Placement
    tensors: Tensors
    first: FirstStrides


@dataclass(frozen=True)
class Calls:
    """The C launches of a schedule."""

    functions: tuple[Template, ...] = ()
    late: bool = False
    """True if the functions call functions of later schedules."""
    workspace: tuple[Template, ...] = ()
    way: Way | None = None
    chip: ChipCalls | None = None
    launches: Mapping[str, PortableLaunch] = field(default_factory=dict)
    """The backward launches that every chip supports."""
    learned: LearnedCalls | None = None
    descs: tuple[str, ...] = ()
    """The names of descriptors other than the descriptors of q, k, v and dout."""
    names: tuple[str, ...] = ()
    """The names of further arguments."""
    tiles: tuple[Tiles, ...] = ()
    tiled: bool = False
    """True if TMA loads tiles."""
    portable: bool = False
    """True if a launch looks up its tile by chip and tensors."""
    decodes: bool = False


@dataclass(frozen=True)
class Vectors:
    """The vectors of the backward pass: one number per query of each head."""

    packed: bool

    @property
    def rows(self) -> str:
        """Number of elements in a vector."""
        return "p->HQ * p->TQ" if self.packed else "p->B * p->HQ * p->SQ"

    @property
    def programs(self) -> str:
        """Number of programs of the delta kernel."""
        return (
            "kgen_cdiv(p->TQ, 64) * p->HQ" if self.packed else "kgen_cdiv(p->SQ, 64) * p->B * p->HQ"
        )

    @property
    def sink_parts(self) -> str:
        """Number of partial sums for the gradients of sinks."""
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
    """Number of heads that programs process at a time."""
    chips: list[ChipCalls]
    dq: PortableLaunch
    dkdv: PortableLaunch
    learned: LearnedCalls | None

    @property
    def zeros(self) -> list[Template]:
        """The statements that clear the tensors to which chip-specific kernels add."""
        return [lines for chip in self.chips for lines in chip.zeros]

    @property
    def starts_next(self) -> str:
        """The condition that the next kernel starts before the kernel of delta ends."""
        return _any(self.chips) or "0"

    @property
    def recomputes(self) -> bool:
        """True if there are kernels that compute only gradients of buffers."""
        return self.learned is not None and bool(self.learned.recomputed)

    @property
    def counters_or_none(self) -> str:
        """The counters that the delta kernel resets to zero, or a null pointer."""
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
    """The C source file with all functions."""

    template: ClassVar[str] = "attention/c/attention.c.j2"

    tensors: Tensors
    first: FirstStrides
    packed: bool
    grouped: bool
    paged: bool
    backward: bool
    dims: int
    """Number of dimensions of q, k and v."""
    dtype: str
    bytes: int
    default_scale: str
    programs_of_queries: str
    programs_of_keys: str | None
    plain: list[str]
    """The sizes that kernels take as scalar arguments."""
    sizes: list[str]
    checks: list[Check]
    aligned: list[str]
    """The members with narrow values, which must be aligned."""
    aligned_backward: list[str]
    tiled: bool
    """True if TMA loads tiles."""
    portable: bool
    decodes: bool
    pairs: bool
    diagonals: bool
    flags: list[str]
    """The members of a problem that are true if chip-specific backward kernels can run."""
    parts: list[Template]
    """The forward and backward passes."""

    @property
    def queries(self) -> str:
        """The common number of queries."""
        return "TQ" if self.packed else "SQ"

    @property
    def keys(self) -> str:
        return "TK" if self.packed else "SK"
