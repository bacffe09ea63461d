"""Calls of linear attention from C: the files in `templates/linear_attention/c`, and the names of
launch arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.linear_attention.plan.planning import LinearAttentionPlan, plan_linear_attention
from kgen.kernels.linear_attention.plan.tiles import Tile, tile_tables
from kgen.kernels.linear_attention.schedules import keeps, schedule_of
from kgen.kernels.linear_attention.targets.triton.functions import Functions
from kgen.kernels.linear_attention.targets.triton.gradients import (
    BackwardBuilder,
    BackwardKernels,
)
from kgen.kernels.linear_attention.targets.triton.interface import Interface
from kgen.kernels.linear_attention.targets.triton.kernels import Builder, Kernels, Solve
from kgen.kernels.linear_attention.targets.triton.native_example import layer_example
from kgen.kernels.linear_attention.targets.triton.native_operators import call_of, operators_of
from kgen.kernels.linear_attention.targets.triton.native_tensors import (
    FAR_COLUMNS,
    FAR_TOKENS,
    Argument,
    Arguments,
    Learned,
    Room,
    Rooms,
    arguments_of,
)
from kgen.kernels.linear_attention.targets.triton.signatures import KernelSignature
from kgen.kernels.linear_attention.targets.triton.sources import recurrence, signatures
from kgen.kernels.linear_attention.targets.triton.steps import Step, Steps
from kgen.spec.load import Loaded
from kgen.targets import opening
from kgen.targets.native import Check, Header, Native, Program, Tiles, prefix_of, unique
from kgen.targets.template import Template
from kgen.targets.triton import tables

HINT = "make tensors contiguous, or name heads to `kgen build`, as `--heads` or `--gqa`"
TILE = ("BLOCK_K", "BLOCK_V", "ROWS", "num_warps", "num_stages")
"""The fields of a tile in C. Fields that a kernel does not use are 0."""


@dataclass(frozen=True)
class Renamed:
    """A name in kernels that has another tensor after a launch."""

    name: str
    other: str
    like: str
    """The struct member of an argument with its shape. Its own strides are dense."""
    stride: str
    """The first name of the strides."""
    rank: int


@dataclass(frozen=True)
class Zeros:
    """A tensor of the caller that the launcher fills with zeros before a launch."""

    member: str
    bytes: str


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel."""

    kernel: str
    tile: str
    """The member of the problem with the tile."""
    programs: str
    zeros: tuple[Zeros, ...]
    renamed: tuple[Renamed, ...]


@dataclass(frozen=True, kw_only=True)
class LayerHeader(Header):
    """The header: the struct of arguments, and the functions."""

    template: ClassVar[str] = "linear_attention/c/layer.h.j2"

    K: int
    V: int
    recurrence: tuple[str, ...]
    """The steps of a token, in words of the spec."""
    head_words: str
    chunks: str
    """The sentence that defines the numbers of sequences and chunks."""
    scale: str
    """The default of `scale`, in words."""
    arguments: Arguments
    backward: bool
    decode: bool
    saves: bool
    """True if forward keeps tensors for backward."""


@dataclass(frozen=True)
class Backward(Template):
    """The functions of the backward pass."""

    template: ClassVar[str] = "linear_attention/c/_backward.j2"

    name: str
    arguments: Arguments
    learned: tuple[Learned, ...]
    rooms: tuple[Room, ...]
    saves: bool
    recomputes_output: bool
    """True if backward computes the output before gate and norm again."""
    mapped: tuple[Renamed, ...]
    """The results of feature maps."""
    raw: tuple[Argument, ...]
    """The inputs of feature maps."""
    first: tuple[Launch, ...]
    steps: tuple[Launch, ...]
    parts: str | None
    """The number of parts of dG, if a kernel adds them up."""
    beta_parts: str | None
    far: Check


@dataclass(frozen=True)
class Decode(Template):
    """The functions that step states."""

    template: ClassVar[str] = "linear_attention/c/_decode.j2"

    name: str
    arguments: Arguments
    rooms: tuple[Room, ...]
    step: Launch
    finish: Launch | None
    far: Check
    far_tokens: Check


@dataclass(frozen=True, kw_only=True)
class LayerProgram(Program):
    """The functions."""

    template: ClassVar[str] = "linear_attention/c/layer.c.j2"

    BT: int
    varlen: bool
    default_scale: str
    arguments: Arguments
    read: tuple[Argument, ...]
    """The inputs that kernels take."""
    tiled: tuple[str, ...]
    """The kernels, as members of a problem that have their tiles."""
    checks: tuple[Check, ...]
    strides: tuple[Check, ...]
    saved: tuple[Room, ...]
    rooms: tuple[Room, ...]
    """The tensors that forward does not keep."""
    flags: tuple[str, ...]
    """The constants of kernels that are 1 in each call."""
    chunks: tuple[Launch, ...]
    output: Launch
    finish: Launch | None
    saves: bool
    backward: Backward | None
    decode: Decode | None


def native(loaded: Loaded, sizes: Mapping[str, Sequence[int]], chips: Collection[int]) -> Native:
    """Return the files that call the kernels of a spec.

    `sizes` are the sizes that the spec leaves open and the package has machine code for. All chips
    have the same kernels.
    """
    plan = plan_linear_attention(loaded)
    calls = _Calls(loaded, plan)
    return Native(
        calls.header(),
        calls.program(),
        layer_example(loaded, plan, calls.arguments, sizes),
        _names(plan, calls.signatures.values()),
        [Tiles(f"{n}_tiles", _rows(tile_tables(plan)[n])) for n in calls.signatures],
        HINT,
        # Kernels for one chip are called from Python only.
        kernels=[one.name for one in calls.signatures.values()] if schedule_of(plan) else None,
        operators=operators_of(calls.interface, calls.arguments, calls.name, calls.license),
        call=call_of(calls.interface),
    )


class _Calls:
    """Build the files of one plan."""

    def __init__(self, loaded: Loaded, plan: LinearAttentionPlan) -> None:
        self.plan, self.spec = plan, plan.spec
        self.name, self.license = prefix_of(loaded), plan.spec.license.in_comment()
        self.interface = Interface(plan, loaded.called)
        functions = Functions(plan, set())
        builder = Builder(plan, functions)
        self.kernels: Kernels = builder.kernels()
        self.of_backward: BackwardKernels | None = None
        if plan.backward:
            self.of_backward = BackwardBuilder(builder, functions).kernels()
        self.signatures = signatures(self.kernels, self.of_backward)
        self.steps = Steps(plan)
        self.rooms = Rooms(plan, self.kernels, self.of_backward)
        self.arguments = arguments_of(plan, loaded.called, self.rooms.kept())
        self.saves = plan.backward and plan.spec.saves_states

    def header(self) -> LayerHeader:
        """Return the header."""
        spec, plan = self.spec, self.plan
        BT = spec.chunk_size
        chunks = f"chunks is floor(T / {BT}) + N, the room for all chunks of N packed sequences"
        if not spec.varlen:
            chunks = f"There are N = B sequences of NT = ceil(T / {BT}) chunks; chunks is B * NT"
        return LayerHeader(
            name=self.name,
            license=self.license,
            summary=opening(spec, in_comment=True),
            passes=spec.passes,
            K=spec.head_dim.qk,
            V=spec.head_dim.v,
            recurrence=tuple(recurrence(plan)),
            head_words=self.interface.head_words(),
            chunks=chunks,
            scale=self.interface.docstring().scale,
            arguments=self.arguments,
            backward=plan.backward,
            decode=plan.decode,
            saves=self.saves,
        )

    def program(self) -> LayerProgram:
        """Return the functions."""
        spec, arguments = self.spec, self.arguments
        taken = {one.name for s in self.signatures.values() for one in s.operands}
        finish = self.steps.finish(self.kernels)
        scale = spec.head_dim.qk**-0.5 if spec.scale is None else float(spec.scale)
        return LayerProgram(
            name=self.name,
            license=self.license,
            BT=spec.chunk_size,
            varlen=spec.varlen,
            default_scale=repr(scale),
            arguments=arguments,
            read=tuple(one for one in arguments.inputs if one.name in taken),
            tiled=tuple(self.signatures),
            checks=(_heads(self.plan), *_packing(spec.varlen)),
            strides=tuple(
                _apart(one, 1, "tokens", FAR_TOKENS) for one in arguments.inputs if one.by_token
            ),
            saved=self.rooms.saved(),
            rooms=self.rooms.forward(),
            flags=(Solve.FLAG,) if keeps(self.plan) else (),
            chunks=tuple(map(self.launch, self.steps.chunks(self.kernels))),
            output=self.launch(self.steps.output(self.kernels)),
            finish=self.launch(finish) if finish else None,
            saves=self.saves,
            backward=self._backward(self.of_backward) if self.of_backward else None,
            decode=self._decode() if self.plan.decode else None,
        )

    def launch(self, step: Step) -> Launch:
        """Return a launch in C. The caller's tensors are filled with zeros as in Python."""
        given = {one.name: one for one in (*self.arguments.gradients, self.arguments.o)}
        given |= {one.argument.name: one.argument for one in self.arguments.learned}
        cleared = [given[made.name] for made in step.tensors if made.zeros]
        return Launch(
            kernel=step.kernel,
            tile=step.name,
            programs=step.grid.in_c(),
            zeros=tuple(Zeros(one.member, f"{one.bytes} * {one.numel}") for one in cleared),
            renamed=tuple(self._renamed(*one) for one in step.renamed if one[0] != "o_raw"),
        )

    def _renamed(self, name: str, other: str) -> Renamed:
        of = {one.name: one for one in (*self.arguments.inputs, self.arguments.do)}[name]
        return Renamed(name, other, of.member, of.stride, of.rank)

    def _backward(self, kernels: BackwardKernels) -> Backward:
        taken = {one.name for s in self.signatures.values() for one in s.operands}
        names = {constant for s in self.signatures.values() for constant in s.constants}
        inputs = {one.name: one for one in self.arguments.inputs}
        made = self.steps.made_by_backward()
        mapped = [n for n in ("q", "k") if f"{n}_raw" in taken]
        return Backward(
            name=self.name,
            arguments=self.arguments,
            learned=self.arguments.learned,
            rooms=self.rooms.backward(),
            saves=self.saves,
            recomputes_output=self.plan.finishes and not self.saves,
            mapped=tuple(self._renamed(n, f"{n}_mapped") for n in mapped),
            raw=tuple(inputs[n] for n in mapped),
            first=tuple(map(self.launch, self.steps.first(self.kernels, kernels))),
            steps=tuple(map(self.launch, self.steps.backward(kernels))),
            parts=made["dG"].shape[0].in_c() if "PARTS" in names else None,
            beta_parts=made["dbetas"].shape[0].in_c() if "BETA_PARTS" in names else None,
            far=_apart(self.arguments.do, 1, "tokens", FAR_COLUMNS),
        )

    def _decode(self) -> Decode:
        finish = self.steps.finish(self.kernels)
        return Decode(
            name=self.name,
            arguments=self.arguments,
            rooms=self.rooms.decode(),
            step=self.launch(self.steps.decode(self.kernels)),
            finish=self.launch(finish) if finish else None,
            far=_apart(self.arguments.state, 2, "rows", FAR_COLUMNS),
            far_tokens=_apart(self.arguments.token_states, 3, "rows", FAR_COLUMNS),
        )


def _names(plan: LinearAttentionPlan, kernels: Iterable[KernelSignature]) -> list[str]:
    """Return the names of all launch arguments. The strides of a tensor are adjacent."""
    found, strides = list[str](), dict[str, tuple[str, ...]]()
    for kernel in kernels:
        found += [f"{one.name}_ptr" for one in kernel.operands]
        found += [*kernel.numbers, *kernel.constants]
        for one in kernel.operands:
            own = tuple(one.strides)
            if len(own) > len(strides.get(one.name, ())):
                strides[one.name] = own
    packing = ["cu_seqlens_ptr", "seqs_ptr", "T", "NT", "BLOCK"] if plan.spec.varlen else []
    named = [stride for own in strides.values() for stride in own]
    return unique([*found, *named, *packing, *TILE])


def _rows(table: Mapping[int, Tile]) -> list[tuple[Collection[int], Mapping[str, int | bool]]]:
    """Return the rows of a table."""
    rows = tables.rows({chip: [tile] for chip, tile in table.items()})
    return [(chips, {name: getattr(tile, name) or 0 for name in TILE}) for chips, tile in rows]


# --- checks of the numbers of heads and of strides, as in the emitted function ---


def _heads(plan: LinearAttentionPlan) -> Check:
    heads, both = plan.spec.heads, ("(long long)p->H", "(long long)p->HV")
    if heads.qk:
        wrong = f"p->H != {heads.qk} || p->HV != {heads.v}"
        return Check(
            wrong, f"q must have {heads.qk} heads and v {heads.v}, got %lld and %lld", both
        )
    if heads.group:
        many = f"{heads.group} heads for each head of" if heads.group > 1 else "as many heads as"
        message = f"v must have {many} q, got %lld and %lld"
        return Check(f"p->HV != {heads.group} * p->H", message, both[::-1])
    message = "the number of heads of v must be a multiple of that of q, got %lld and %lld"
    return Check("p->H <= 0 || p->HV % p->H", message, both[::-1])


def _packing(varlen: bool) -> list[Check]:
    if not varlen:
        return []
    few = "cu_seqlens must be [N + 1] for N sequences, got [%lld]"
    return [
        Check("p->B != 1", "packed sequences need B = 1, got %lld", ("(long long)p->B",)),
        Check("p->N < 1", few, ("(long long)p->N + 1",)),
    ]


def _apart(of: Argument, axis: int, what: str, power: int) -> Check:
    return Check(
        f"a->{of.member}.strides[{axis}] >= INT64_C(1) << {power}",
        f"{what} of {of.label} must be less than 2**{power} elements apart: make it contiguous",
    )
