"""The CuTe DSL target of chunk_output: one file for each architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.chunk_output.plan.planning import ChunkOutputPlan, plan_chunk_output
from kgen.kernels.chunk_output.targets.cute import words
from kgen.kernels.chunk_output.targets.cute.decay import Decay, decay
from kgen.kernels.chunk_output.targets.cute.launcher import (
    ELEMENTS,
    Launcher,
    LaunchNumbers,
    docstring,
    launch_numbers,
    launcher,
)
from kgen.kernels.chunk_output.targets.interface import packing, signature
from kgen.spec.load import Loaded
from kgen.targets import Source, opening
from kgen.targets.code import CUTE, Code, Name, Statement, assign, op
from kgen.targets.launching import ImportsLaunch
from kgen.targets.template import Template

FILES = {"sm_90a": "sm90", "sm_100a": "sm100"}
RANKS = {"sm_90a": 2, "sm_100a": 0}
"""Ranks of the files; Triton has 1.

On an H200 the sm_90a kernel is faster (docs/performance/chunk_output.md). The sm_100a kernel has
not run.
"""

WARPGROUPS = 2
"""Consumer warpgroups on sm_90a. Each computes a different value head."""
STAGES = 2
"""Stages of q and k, and of h and v.

With two stages, the kernel reaches 95 % of the rate of a copy on an H200; three are not faster. The
number is a multiple of the warpgroups. So each stage has one reading warpgroup, which waits for
every phase of its barrier.
"""
COLUMNS = 512
"""Columns of tensor memory: all of a multiprocessor, which runs one CTA."""


@dataclass(frozen=True)
class Chunks(Template):
    """The device functions that find, load and store the rows of a chunk."""

    template: ClassVar[str] = "chunk_output/cute/_chunks.j2"

    varlen: bool
    gated: bool
    element: str


@dataclass(frozen=True)
class Sizes:
    """The sizes of a kernel."""

    k: int
    v: int
    bt: int
    """Tokens of a chunk."""
    qk_stages: int = STAGES
    hv_stages: int = STAGES


@dataclass(frozen=True)
class State:
    """The layout of a state in shared memory."""

    order: str
    major: str


@dataclass(frozen=True)
class Words:
    """Parts of a module's docstring."""

    formula: list[str]
    arguments: list[str]
    usage: str
    """The arguments of a call."""


@dataclass(frozen=True)
class Common:
    """The parts that the files of both architectures share."""

    words: Words
    sizes: Sizes
    state: State
    varlen: bool
    gated: bool
    """True if a gate of each token is read."""
    natural: bool
    """True if the base of the decay is e."""
    hv_arrivals: str
    """Arrivals that complete a stage of h and v: one for the bytes of TMA, and 32 for the lanes
    that store gates.
    """
    indices: list[str]
    """The tensors with the offsets of packed sequences, and their chunks."""
    extras: list[str]
    """The tensors that the kernel reads without TMA."""
    v_start: Code
    """The first row of a chunk in v."""
    numbers: LaunchNumbers


@dataclass(frozen=True)
class Module(ImportsLaunch):
    """A file for one architecture: the kernel, `_launch`, which builds its tensors, and the
    launcher.
    """

    language: ClassVar[str] = CUTE

    name: str
    summary: str
    element: str
    common: Common
    decay: Decay | None
    weight: Code
    """Element `e` of q @ k^T, multiplied by its decay."""
    chunks: Chunks
    launcher: Launcher


@dataclass(frozen=True)
class Sm90(Module):
    """The file for compute capability 9.0."""

    template: ClassVar[str] = "chunk_output/cute/chunk_output_sm90.j2"

    warpgroups: int = WARPGROUPS


@dataclass(frozen=True)
class TensorMemory:
    """The first columns of the accumulators in tensor memory. q @ k^T begins at column 0."""

    qh: int
    pv: int
    columns: int = COLUMNS


@dataclass(frozen=True)
class Sm100(Module):
    """The file for compute capability 10.0."""

    template: ClassVar[str] = "chunk_output/cute/chunk_output_sm100.j2"

    tensor_memory: TensorMemory
    v_head: Statement | None
    """The statement that computes the value head, if exponents depend on it."""
    power: Code | None
    """The decay of the row of element `e`."""


def sources(loaded: Loaded) -> list[Source]:
    """Return a file for each architecture that the spec lists."""
    plan, modules = plan_chunk_output(loaded), {"sm_90a": _sm90, "sm_100a": _sm100}
    return [
        Source(
            f"cute_{FILES[arch]}.py",
            modules[arch](plan),
            arch,
            rank=RANKS[arch],
            needs="cutlass",
            launches=True,
            signature=signature(plan),
            docstring=docstring(plan),
        )
        for arch in loaded.spec.targets.cute.arch
    ]


def _sm90(plan: ChunkOutputPlan) -> Sm90:
    own = decay(plan)
    return Sm90(
        name=plan.spec.name,
        summary=opening(plan.spec),
        element=ELEMENTS[plan.spec.dtype],
        common=_common(plan),
        decay=own,
        weight=op("s[e]") if own is None else own.weighted("s[e]"),
        chunks=_chunks(plan),
        launcher=launcher(plan),
    )


def _sm100(plan: ChunkOutputPlan) -> Sm100:
    spec, own = plan.spec, decay(plan)
    v_head = assign("v_head", op("item % H * GROUP + slot % GROUP"))
    return Sm100(
        name=spec.name,
        summary=opening(spec),
        element=ELEMENTS[spec.dtype],
        common=_common(plan),
        decay=own,
        weight=op("weights[e]") if own is None else own.weighted("weights[e]"),
        chunks=_chunks(plan),
        launcher=launcher(plan),
        tensor_memory=TensorMemory(qh=spec.chunk_size, pv=spec.chunk_size + spec.head_dim.v),
        v_head=v_head if own and own.head_needed else None,
        power=None if own is None else op("power[e // 2 % 2]"),
    )


def _chunks(plan: ChunkOutputPlan) -> Chunks:
    return Chunks(plan.spec.varlen, "g" in plan.gates, ELEMENTS[plan.spec.dtype])


def _common(plan: ChunkOutputPlan) -> Common:
    spec, gated = plan.spec, "g" in plan.gates
    transposed, padded = spec.state_layout == "vk", spec.v_layout == "chunk_padded"
    return Common(
        words=Words(words.formula(plan), words.argument_words(plan), signature(plan).usage),
        sizes=Sizes(spec.head_dim.qk, spec.head_dim.v, spec.chunk_size),
        state=State("ROW_MAJOR", "K") if transposed else State("COL_MAJOR", "MN"),
        varlen=spec.varlen,
        gated=gated,
        natural=plan.exponent is not None and plan.natural,
        hv_arrivals="1 + 32" if gated else "1",
        indices=packing(spec),
        extras=[*plan.gates, *packing(spec)],
        v_start=op("i * BT") if padded else Name("start"),
        numbers=launch_numbers(plan),
    )
