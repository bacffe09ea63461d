"""Launches of the Hopper kernels from C: their conditions, TMA descriptors and order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kgen.kernels.attention.schedules.hopper.plan import HALF, HopperPlan, HopperTile, plan_hopper
from kgen.kernels.attention.schedules.hopper.streams import Stream, streams_of
from kgen.kernels.attention.targets.triton.native_calls import (
    Calls,
    ChipCalls,
    FirstStrides,
    Prepared,
    Tiled,
    Vectors,
    Way,
)
from kgen.kernels.attention.targets.triton.native_tensors import BufferTensor
from kgen.targets.template import Template, filled

ARCH = 90
"""The compute capability of the kernels."""
FLAG = "on_hopper"
"""The member of a problem that is true if the kernels can run."""


@dataclass(frozen=True)
class Rope:
    """The rope columns of a tensor, with the index of the first."""

    tensor: str
    first: int


@dataclass(frozen=True)
class StreamedTensor:
    """A tensor that is loaded for each tile, in addition to K and V."""

    name: str
    tensor: BufferTensor
    at: int


@dataclass(frozen=True)
class HopperForward(Template):
    """The forward kernel: its conditions and its launch."""

    template: ClassVar[str] = "attention/hopper/_forward_calls.j2"

    tile: HopperTile
    streams: tuple[StreamedTensor, ...]
    descs: tuple[Tiled, ...]
    ropes: tuple[Rope, ...]
    dynamic: bool
    """True if programs take tiles from a counter, and begin before another kernel ends."""
    group: int
    paged: bool

    @property
    def rows(self) -> int:
        """Number of queries per consumer."""
        return self.tile.BLOCK_M // self.tile.consumers

    @property
    def tiles(self) -> int:
        """Number of TMA descriptors."""
        return len(self.streams) + len(self.descs)

    @property
    def pdl(self) -> int:
        return int(self.dynamic)

    @property
    def stream_checks(self) -> str:
        """The condition that TMA can load the streamed tensors, as a term to append."""
        of = (s.tensor for s in self.streams)
        return "".join(f" && kgen_by_tma(&{t.member}, 4, {t.bytes})" for t in of)


@dataclass(frozen=True)
class KeyTile:
    """The tile of the dk and dv kernel."""

    queries: int
    """Number of queries in a tile of log-sum-exp or delta."""
    BLOCK_M: int
    BLOCK_N: int
    SLOTS: int
    programs: int
    """Number of keys per program."""


@dataclass(frozen=True)
class HopperBackward:
    """The backward kernels."""

    descs: tuple[Tiled, ...]
    short_descs: tuple[Tiled, ...]
    """Descriptors for the dk and dv kernel only, which has shorter tiles."""
    ropes: tuple[Rope, ...]
    stored: tuple[str, ...]
    dynamic: bool
    fused: HopperTile | None
    """The tile of the kernel that computes dq, dk and dv. None without one."""
    of_keys: KeyTile
    dq: HopperTile | None
    sums: int
    """Number of elements per block of queries in the sums of dq."""
    least_keys: int
    half: int = HALF
    dq_rows: int = 2 * HALF

    @property
    def stores(self) -> str:
        """The condition that TMA can store the gradients, as a term to append."""
        return "".join(f" && by_tma(&a->{x})" for x in self.stored)

    @property
    def again(self) -> list[Tiled]:
        """The descriptors that the dq kernel needs a second time."""
        return (
            [d for d in self.descs if d.name in ("q_desc", "do_desc")] if self.short_descs else []
        )

    @property
    def at_lse(self) -> int:
        """The index of the descriptor of log-sum-exp."""
        return len(self.descs) + len(self.short_descs)

    @property
    def at_delta(self) -> int:
        return self.at_lse + 1

    @property
    def tiles(self) -> int:
        """Number of TMA descriptors."""
        return self.at_delta + 1

    @property
    def enough(self) -> str:
        """The condition under which one kernel is faster than two, as a term to append."""
        if not self.dynamic:
            return ""
        return " && 2 * programs_of_keys(p, 128) >= 3 * (int64_t)p->device.multiprocessors"


@dataclass(frozen=True)
class ForwardWorkspace(Template):
    """The statement that reserves workspace for a tile counter."""

    template: ClassVar[str] = "attention/hopper/_forward_workspace.j2"


@dataclass(frozen=True)
class BackwardServes(Template):
    """The C predicate that is true if the backward kernels can run."""

    template: ClassVar[str] = "attention/hopper/_backward_serves.j2"

    stores: str


@dataclass(frozen=True)
class BackwardPlanned(HopperBackward, Template):
    """The statements that assign the workspace of the backward kernels."""

    template: ClassVar[str] = "attention/hopper/_backward_planned.j2"

    vectors: Vectors = field(kw_only=True)


@dataclass(frozen=True)
class BackwardLaunch(HopperBackward, KeyTile, Template):
    """The C function that launches the backward kernels."""

    template: ClassVar[str] = "attention/hopper/_backward_launch.j2"

    packed: bool = field(kw_only=True)
    first: FirstStrides = field(kw_only=True)


@dataclass(frozen=True)
class BackwardZeros(HopperBackward, Template):
    """The statements that clear the sums of dq."""

    template: ClassVar[str] = "attention/hopper/_backward_zeros.j2"


def calls(of: Prepared, others: Sequence[Calls]) -> Calls:
    """Return the launches of the Hopper kernels, if there is machine code for them."""
    hopper = plan_hopper(of.free_plan) if ARCH in of.chips else None
    if hopper is None:
        return Calls()
    streams = streams_of(hopper, of.free_lowering)
    forward, backward = _forward(of, hopper, streams), backward_on_hopper(hopper)
    chip = _chip(of, backward) if backward is not None else None
    if forward is None:
        return Calls(chip=chip)
    launch = "launch_forward_on_hopper(a, &p, v, (char *)workspace, stream)"
    return Calls(
        functions=(forward,),
        workspace=(ForwardWorkspace(),) if hopper.dynamic else (),
        way=Way(launch, "forward_on_hopper"),
        chip=chip,
        descs=tuple(f"{stream.name}_desc" for stream in streams),
        tiled=True,
    )


def _chip(of: Prepared, backward: HopperBackward) -> ChipCalls:
    packed = of.plan.spec.varlen
    return ChipCalls(
        flag=FLAG,
        arch=ARCH,
        when="backward_on_hopper(a, &p)",
        call="launch_on_hopper(a, p, m, v, workspace, stream)",
        serves=BackwardServes(backward.stores),
        planned=filled(BackwardPlanned, backward, vectors=Vectors(packed)),
        launch=filled(BackwardLaunch, backward.of_keys, backward, packed=packed, first=of.first),
        zeros=[filled(BackwardZeros, backward)] if backward.fused is not None else [],
        dq=backward.dq is not None,
        counts=backward.dynamic,
    )


def _forward(of: Prepared, hopper: HopperPlan, streams: Sequence[Stream]) -> HopperForward | None:
    """Return the forward kernel, or None."""
    tile, pages, width = hopper.forward, hopper.page_rows, hopper.width
    if tile is None:
        return None
    given = {b.name: b for b in of.tensors.buffers}
    keys = "BLOCK_N" if pages is None else str(pages)
    rows = {"q": "ROWS", "k": keys, "v": keys, "o": "ROWS"}
    columns = dict.fromkeys("qkv", width) | {"o": width // 2 if tile.out_in_halves else width}
    places = {"o": "a->out"} | ({x: f"{x}_pages" for x in "kv"} if pages is not None else {})
    descs = [(x, places.get(x, f"a->{x}"), rows[x], columns[x]) for x in "qkvo"]
    roped = ["q", "k"] if hopper.rope else []
    descs += [(f"{x}_rope", f"{x}_rope", rows[x], hopper.rope) for x in roped]
    return HopperForward(
        tile=tile,
        streams=tuple(StreamedTensor(s.name, given[s.buffer], i) for i, s in enumerate(streams)),
        descs=_tiled(descs, len(streams)),
        ropes=tuple(Rope(x, width) for x in roped),
        dynamic=hopper.dynamic,
        group=max(hopper.heads, of.at.group),
        paged=of.plan.spec.paged_kv is not None,
    )


def backward_on_hopper(hopper: HopperPlan) -> HopperBackward | None:
    """Return the backward kernels, or None."""
    dkdv, width, fused = hopper.dkdv, hopper.width, hopper.fused
    if dkdv is None:
        return None
    of_dq = ["dq"] if hopper.dq is not None else []
    stored = [*of_dq, "dk", "dv"]
    places = {"do": "a->dout"}
    descs = [
        (x, places.get(x, f"a->{x}"), str(HALF), width) for x in ["q", "k", "v", "do", *stored]
    ]
    roped = ["q", "k", *of_dq, "dk"] if hopper.rope else []
    descs += [(f"{x}_rope", f"{x}_rope", str(HALF), hopper.rope) for x in roped]
    short = ("q", "do") if dkdv.BLOCK_M < HALF and fused is None else ()
    short_descs = [(x, places.get(x, f"a->{x}"), str(dkdv.BLOCK_M), width) for x in short]
    keys = fused or dkdv
    return HopperBackward(
        descs=_tiled(descs, 0),
        short_descs=_tiled(short_descs, len(descs)),
        ropes=tuple(Rope(x, width) for x in roped),
        stored=tuple(stored),
        dynamic=hopper.dynamic,
        fused=fused,
        of_keys=KeyTile(keys.BLOCK_M, keys.BLOCK_M, keys.BLOCK_N, dkdv.SLOTS, dkdv.BLOCK_N),
        dq=hopper.dq,
        sums=HALF * width,
        least_keys=hopper.least_keys,
    )


def _tiled(found: Sequence[tuple[str, str, str, int]], first: int) -> tuple[Tiled, ...]:
    """Return descriptors, with their indices, from (name, tensor, rows, columns)."""
    return tuple(
        Tiled(f"{name}_desc", tensor, rows, columns, first + at)
        for at, (name, tensor, rows, columns) in enumerate(found)
    )
