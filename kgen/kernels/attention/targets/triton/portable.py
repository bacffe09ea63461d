"""The kernels for every chip: what the templates of each print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kgen.expr.nodes import reads, variables
from kgen.kernels.attention.lowered.block_mask import BlockMaskKernel, block_mask_kernel
from kgen.kernels.attention.lowered.decode import DecodeKernel, decode_kernel
from kgen.kernels.attention.lowered.kernels import accumulators, loop_kernel
from kgen.kernels.attention.lowered.loads import block_of, columns_of, load_of
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.lowered.model import (
    Columns,
    Gradients,
    KernelParams,
    Load,
    LoopKernel,
    Param,
    Stream,
    declared,
)
from kgen.kernels.attention.lowered.params import (
    PAGES,
    combine_params,
    decode_params,
    delta_params,
    diagonal_params,
    dkdv_params,
    dq_params,
    forward_params,
    pair_params,
)
from kgen.kernels.attention.lowered.ranges import lists_of
from kgen.kernels.attention.lowered.recomputed import (
    DiagonalKernel,
    PairKernel,
    Recomputed,
    diagonal_kernel,
    pair_kernel,
)
from kgen.kernels.attention.plan.block_mask import BlockMask
from kgen.kernels.attention.plan.decode import DecodePlan
from kgen.kernels.attention.plan.model import AttentionPlan, TileLoop
from kgen.kernels.attention.schedules.hopper.plan import HopperPlan
from kgen.kernels.attention.targets.triton.exact import Exact
from kgen.kernels.attention.targets.triton.placement import Placement
from kgen.targets.code import Assign, Code, as_type, assign, load, op, row
from kgen.targets.template import Template


@dataclass(frozen=True)
class Head:
    """The columns of a head, and how kernels multiply them."""

    qk: list[Columns]
    v: list[Columns]
    columns: list[Assign]
    """The lines that make the columns of all blocks."""
    v_columns: list[Assign]
    """The lines that make the columns of the values alone."""
    dot: str
    precision: list[str]


@dataclass(frozen=True)
class Forward(Template):
    """The forward kernel."""

    template: ClassVar[str] = "attention/triton/_forward.j2"

    kernel: LoopKernel
    params: KernelParams
    head: Head
    at: Placement
    exact: Exact
    no_specialize: str
    sink: Code | None
    """The load of a head's sink; None without sinks."""

    @property
    def dead_rows(self) -> str:
        """The results of rows that saw no key, as a comment says it."""
        return dead_rows(sinks=self.sink is not None)

    @property
    def k_stream(self) -> Stream:
        """The keys of a tile, which scores wait for."""
        return self.kernel.operands.streams[0]

    @property
    def v_stream(self) -> Stream:
        """The values of a tile."""
        return self.kernel.operands.streams[1]


@dataclass(frozen=True)
class Delta(Template):
    """The kernel of delta, the first of the backward pass."""

    template: ClassVar[str] = "attention/triton/_delta.j2"

    params: KernelParams
    head: Head
    at: Placement
    exact: Exact
    loads: list[Load]
    """The columns of out and dO."""
    rounded: str
    """dO as rounded as in dP = dO @ V^T, from which delta is subtracted."""
    sink: Code | None
    begins_another: bool
    """True where a kernel may begin beside the end of this one."""
    counts: bool
    """True where that one counts its tiles."""

    @property
    def options(self) -> list[str]:
        """The further parameters that are known when it is compiled."""
        return ["BEFORE_HOPPER: tl.constexpr"] if self.begins_another else []


@dataclass(frozen=True)
class _OfBackward(Template):
    """The base of the kernels of dq, and of dk and dv."""

    kernel: LoopKernel
    params: KernelParams
    head: Head
    at: Placement
    exact: Exact
    no_specialize: str

    @property
    def stream(self) -> Stream:
        """Both tensors that stream."""
        return self.kernel.operands.streams[0]

    @property
    def gradients(self) -> Gradients:
        """The gradients that a tile adds to."""
        assert self.kernel.gradients is not None
        return self.kernel.gradients


@dataclass(frozen=True)
class Dq(_OfBackward):
    """The kernel of dq."""

    template: ClassVar[str] = "attention/triton/_dq.j2"


@dataclass(frozen=True)
class DkDv(_OfBackward):
    """The kernel of dk and dv."""

    template: ClassVar[str] = "attention/triton/_dkdv.j2"


@dataclass(frozen=True)
class Pair(Template):
    """A kernel for a gradient with an element for each (query, key)."""

    template: ClassVar[str] = "attention/triton/_pair.j2"

    kernel: PairKernel
    params: KernelParams
    head: Head
    at: Placement
    exact: Exact
    no_specialize: str

    @property
    def address_line(self) -> Assign:
        """The line that makes the addresses of the tile's gradient."""
        return assign(f"{self.tile.name}_tile", self.kernel.address)

    @property
    def tile(self) -> Recomputed:
        """The tile that it computes once more."""
        return self.kernel.tile


@dataclass(frozen=True)
class Diagonal(Template):
    """A kernel for a gradient with an element for each distance."""

    template: ClassVar[str] = "attention/triton/_diagonal.j2"

    kernel: DiagonalKernel
    params: KernelParams
    head: Head
    at: Placement
    exact: Exact
    no_specialize: str

    @property
    def tile(self) -> Recomputed:
        """The tile that it computes once more."""
        return self.kernel.tile


@dataclass(frozen=True)
class Decode(Template):
    """The kernels for few queries."""

    template: ClassVar[str] = "attention/triton/_decode.j2"

    decode: DecodeKernel
    params: KernelParams
    combine_params: KernelParams
    head: Head
    exact: Exact
    width: int
    """Columns of a value."""
    no_specialize: str

    @property
    def kernel(self) -> LoopKernel:
        """The loop over a share of the keys."""
        return self.decode.loop

    @property
    def pages(self) -> list[str]:
        """The parameters of pages."""
        return declared(PAGES)


@dataclass(frozen=True)
class BlockMaskKernels(Template):
    """The kernels that list the blocks which a mask leaves."""

    template: ClassVar[str] = "attention/triton/_block_mask.j2"

    kernel: BlockMaskKernel
    params: KernelParams
    """The parameters of the kernel that decides."""
    no_specialize: str
    lists: list[str]
    backward: bool

    @property
    def q_last(self) -> bool:
        """True where the last query of a block is asked for."""
        return "q_last" in self.kernel.names


@dataclass(frozen=True)
class BackwardKernels:
    """The kernels of the backward pass."""

    delta: Delta
    dq: Dq
    dkdv: DkDv
    pairs: list[Pair]
    diagonals: list[Diagonal]


@dataclass(frozen=True)
class PortableKernels:
    """All kernels that run on every chip."""

    forward: Forward
    """Lowered also where no call takes it."""
    many_queries: bool
    """True where calls take it."""
    decode: Decode | None
    block_mask: BlockMaskKernels | None
    backward: BackwardKernels | None
    helpers: frozenset[str]
    """The functions that they call."""

    @property
    def emitted(self) -> list[Template]:
        """The kernels of a file, in its order."""
        forward, of = self.forward if self.many_queries else None, self.backward
        found: list[Template] = [one for one in (self.block_mask, forward, self.decode) if one is not None]
        return found if of is None else [*found, of.delta, of.dq, of.dkdv, *of.pairs, *of.diagonals]

    @property
    def loops(self) -> dict[str, LoopKernel]:
        """The kernels that loop over tiles of a whole length, by what they compute."""
        found = {"forward": self.forward.kernel}
        if self.backward is not None:
            found |= {"dq": self.backward.dq.kernel, "dkdv": self.backward.dkdv.kernel}
        return found


def portable_kernels(
    lowering: Lowering, at: Placement, decode: DecodePlan | None, hopper: HopperPlan | None
) -> PortableKernels:
    """The kernels of a plan; those of `decode` are of a plan of their own, and those of `hopper` may follow delta's."""
    made, plan = _Portable(lowering, at), lowering.plan
    packed = Lowering(decode.attention) if decode is not None else None
    forward = made.forward()
    decoding = _decode(decode, packed) if decode is not None and packed is not None else None
    mask = made.block_mask(plan.block_mask) if plan.block_mask is not None else None
    backward = made.backward(hopper) if plan.backward else None
    many_queries = decode is None or not decode.alone
    helpers = frozenset(packed.helpers if packed is not None else ())
    if many_queries or hopper is not None:
        helpers |= lowering.helpers
    return PortableKernels(forward, many_queries, decoding, mask, backward, helpers)


class _Portable:
    """Makes the kernels of one plan."""

    def __init__(self, lowering: Lowering, at: Placement) -> None:
        self.lowering, self.plan = lowering, lowering.plan
        self.at, self.exact = at, Exact(self.plan.exact)
        self.head = _head(self.plan, lowering.tf32)
        self.no_specialize = not_specialized([*lowering.sizes, *lowering.open_sizes, *lowering.runtime])
        self.sink = sink_load() if self.plan.spec.sinks else None

    def forward(self) -> Forward:
        state = ["m_i", "l_i", *(f"acc{c.tag}" for c in self.plan.v_chunks)]
        kernel = loop_kernel(self.lowering, self.plan.forward, state)
        params = forward_params(self.lowering, kernel)
        return Forward(kernel, params, self.head, self.at, self.exact, self.no_specialize, self.sink)

    def backward(self, hopper: HopperPlan | None) -> BackwardKernels:
        plan, follows = self.plan, hopper is not None and hopper.dkdv is not None
        assert plan.dq is not None
        assert plan.dkdv is not None
        return BackwardKernels(
            delta=self.delta(follows, follows and hopper is not None and hopper.dynamic),
            dq=self.dq(plan.dq),
            dkdv=self.dkdv(plan.dkdv),
            pairs=[self.pair(loop) for loop in plan.pairs],
            diagonals=[self.diagonal(loop) for loop in plan.diagonals],
        )

    def delta(self, begins_another: bool, counts: bool) -> Delta:
        inside = op("({0})[:, None]", row("lt", "q_idx", "SQ"))
        return Delta(
            params=delta_params(self.lowering, [Param("counter_ptr", "counters")] if counts else []),
            head=self.head,
            at=self.at,
            exact=self.exact,
            loads=[load_of(c, inside) for c in self.plan.v_chunks],
            rounded="_tf32(do)" if self.lowering.tf32 else "do.to(tl.float32)",
            sink=self.sink,
            begins_another=begins_another,
            counts=counts,
        )

    def dq(self, loop: TileLoop) -> Dq:
        own = [f"dq{c.tag}" for c in self.plan.qk_chunks]
        kernel = loop_kernel(self.lowering, loop, [*own, *accumulators(loop)])
        params = dq_params(self.lowering, kernel)
        return Dq(kernel, params, self.head, self.at, self.exact, self.no_specialize)

    def dkdv(self, loop: TileLoop) -> DkDv:
        own = [f"dk{c.tag}" for c in self.plan.qk_chunks] + [f"dv{c.tag}" for c in self.plan.v_chunks]
        kernel = loop_kernel(self.lowering, loop, [*own, *accumulators(loop)])
        params = dkdv_params(self.lowering, kernel)
        return DkDv(kernel, params, self.head, self.at, self.exact, self.no_specialize)

    def pair(self, loop: TileLoop) -> Pair:
        kernel = pair_kernel(self.lowering, loop)
        params = pair_params(self.lowering, kernel)
        return Pair(kernel, params, self.head, self.at, self.exact, self.no_specialize)

    def diagonal(self, loop: TileLoop) -> Diagonal:
        kernel = diagonal_kernel(self.lowering, loop)
        params = diagonal_params(self.lowering, kernel.tile)
        return Diagonal(kernel, params, self.head, self.at, self.exact, self.no_specialize)

    def block_mask(self, mask: BlockMask) -> BlockMaskKernels:
        lowering, backward = self.lowering, self.plan.backward
        kernel = block_mask_kernel(mask, lowering)
        buffers = list(dict.fromkeys(r.buffer for r in reads(mask.condition)))
        scalars = [n for n in lowering.runtime if n in variables(mask.condition)]
        used = kernel.names | {"SQ", "SK"}
        sizes = [n for n in (*lowering.sizes, *scalars) if n in used]
        given = [p for b in buffers for p in lowering.of_buffer(b)]
        given += [lowering.problem[name] for name in (*sizes, *(("GQA",) if "GQA" in used else ()))]
        open_sizes = [size for b in buffers for size in lowering.open[b].values()]
        sides = ("kv", "q") if backward else ("kv",)
        return BlockMaskKernels(
            kernel=kernel,
            params=KernelParams((Param("kinds_ptr", "block_kinds"),), (), tuple(given)),
            no_specialize=not_specialized([*sizes, *open_sizes]),
            lists=[f"{name}_ptr" for side in sides for name in lists_of(side)],
            backward=backward,
        )


def _decode(plan: DecodePlan, lowering: Lowering) -> Decode:
    """The kernels for few queries. `lowering` is of `plan.attention`."""
    found, attention = decode_kernel(plan, lowering), plan.attention
    names = [*lowering.sizes, *lowering.open_sizes, *lowering.runtime, "splits"]
    return Decode(
        decode=found,
        params=decode_params(lowering, found),
        combine_params=combine_params(lowering),
        head=_head(attention, lowering.tf32),
        exact=Exact(attention.exact),
        width=attention.spec.head_dim.v,
        no_specialize=not_specialized(names),
    )


def _head(plan: AttentionPlan, tf32: bool) -> Head:
    return Head(
        qk=[block_of(c, "qk") for c in plan.qk_chunks],
        v=[block_of(c, "dp") for c in plan.v_chunks],
        columns=columns_of([*plan.qk_chunks, *plan.v_chunks]),
        v_columns=columns_of(plan.v_chunks),
        dot="_tf32_dot" if tf32 else "tl.dot",
        precision=[f'input_precision="{plan.spec.precision}"']
        if plan.spec.dtype == "fp32" and not tf32
        else [],
    )


def narrow_values(plan: AttentionPlan) -> bool:
    """True if heads of the values are one whole block of 16 or 32 columns, beside wider heads of the keys."""
    (first, *rest), keys = plan.v_chunks, plan.qk_chunks[0]
    return not rest and first.width == first.size < min(64, keys.size)


def not_specialized(names: Sequence[str]) -> str:
    """Numbers that Triton compiles no kernel of its own for."""
    return f"do_not_specialize={json.dumps([*names])}"


def sink_load() -> Code:
    """The load of a head's sink, in base 2."""
    address = row("add", "sinks_ptr", row("mul", "h", "stride_sinks"))
    return row("mul", as_type(load(address), "float32"), "LOG2E")


def dead_rows(sinks: bool) -> str:
    """The results of rows that saw no key, as a comment says it."""
    if sinks:
        return "A sink of -inf is none: rows that saw no key then have zeros and a log-sum-exp of -inf."
    return "Rows that saw no key: zeros, and a log-sum-exp of -inf."
