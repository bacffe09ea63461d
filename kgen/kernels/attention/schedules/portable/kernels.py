"""Template data of the portable kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from kgen.kernels.attention.lowered.kernels import accumulators, loop_kernel
from kgen.kernels.attention.lowered.loads import load_of
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.lowered.model import (
    Gradients,
    Held,
    KernelParams,
    Load,
    LoopKernel,
    Param,
    Stream,
    TileBody,
)
from kgen.kernels.attention.lowered.params import (
    delta_params,
    diagonal_params,
    dkdv_params,
    dq_params,
    forward_params,
    pair_params,
)
from kgen.kernels.attention.lowered.recomputed import (
    DiagonalKernel,
    PairKernel,
    Recomputed,
    diagonal_kernel,
    pair_kernel,
)
from kgen.kernels.attention.plan.model import TileLoop
from kgen.kernels.attention.targets.triton.exact import Exact
from kgen.kernels.attention.targets.triton.made import Follower
from kgen.kernels.attention.targets.triton.placement import Placement
from kgen.kernels.attention.targets.triton.shared import (
    Head,
    dead_rows,
    head_of,
    not_specialized,
    sink_load,
)
from kgen.targets.code import Assign, Code, If, Name, Statement, assign, op, row
from kgen.targets.template import Template, filled

T = TypeVar("T")


def in_masked_tiles(lines: Sequence[Statement]) -> list[Statement]:
    """Return statements for the tiles that have the mask."""
    return [If(Name("MASKED"), tuple(lines))] if lines else []


def load_of_vector(name: str, guard: Code | None) -> Code:
    """Return the load of a number for each query of a tile."""
    address = row("add", f"{name}_ptr", "q_idx")
    if guard is None:
        return op("tl.load({0})", address)
    return op("tl.load({0}, mask={1}, other=0.0)", address, guard)


@dataclass(frozen=True)
class _Kernel(KernelParams, Template):
    """The fields that all portable kernels share."""

    launched: KernelParams
    """The parameters as one object, for the launcher."""
    head: Head
    at: Placement
    exact: Exact


@dataclass(frozen=True)
class _OfLoop(TileBody, LoopKernel, _Kernel):
    """The fields of kernels that loop over tiles."""

    kernel: LoopKernel
    no_specialize: str

    @property
    def last_query(self) -> list[str]:
        """The statement that computes the last query of a tile, if the kernel uses it."""
        return ["q_last = tl.minimum(q_start + BLOCK_M, SQ) - 1"] if self.last else []


@dataclass(frozen=True)
class Forward(_OfLoop):
    """The forward kernel."""

    template: ClassVar[str] = "attention/portable/_forward.j2"

    sink_load: Code | None
    """The load of a head's sink; None without sinks."""

    @property
    def where_masked(self) -> list[Statement]:
        """The statements that apply the mask to the logits of a tile that has it."""
        return in_masked_tiles(self.logits_masked)

    @property
    def on_dead_rows(self) -> str:
        """The results of rows without a visible key, for a comment."""
        return dead_rows(sinks=self.sink_load is not None)

    @property
    def k_stream(self) -> Stream:
        """The stream of K tiles, for which the scores wait."""
        return self.operands.streams[0]

    @property
    def v_stream(self) -> Stream:
        """The stream of V tiles."""
        return self.operands.streams[1]


@dataclass(frozen=True)
class Delta(_Kernel):
    """The kernel of delta, the first of the backward pass."""

    template: ClassVar[str] = "attention/portable/_delta.j2"

    loads: list[Load]
    """The columns of out and dO."""
    rounded: str
    """dO, rounded as in dP = dO @ V^T, from which delta is subtracted."""
    sink: Code | None
    follower: Follower | None
    """The kernels that may begin before this kernel ends (programmatic dependent launch)."""

    @property
    def options(self) -> list[str]:
        """Further compile-time parameters."""
        return ["START_NEXT: tl.constexpr"] if self.follower is not None else []

    @property
    def counts(self) -> bool:
        """True if the following kernels take tiles from counters."""
        return self.follower is not None and self.follower.counts


@dataclass(frozen=True)
class _OfBackward(_OfLoop):
    """The base of the kernels of dq, and of dk and dv."""

    gradients: Gradients
    """The gradients that each tile adds to."""

    @property
    def stream(self) -> Stream:
        """The stream of the two tensors that the loop loads for each tile."""
        return self.operands.streams[0]


@dataclass(frozen=True)
class Dq(_OfBackward):
    """The kernel of dq."""

    template: ClassVar[str] = "attention/portable/_dq.j2"

    @property
    def where_masked(self) -> list[Statement]:
        """The statements that apply the mask to P of a tile that has it."""
        note = "mask p, not qk: in rows without keys, qk - lse would be -inf + inf"
        return in_masked_tiles([replace(line, note=note) for line in self.p_masked])


@dataclass(frozen=True)
class DkDv(_OfBackward):
    """The kernel of dk and dv."""

    template: ClassVar[str] = "attention/portable/_dkdv.j2"

    @property
    def last_key(self) -> list[str]:
        """The statement that computes the last key of a tile, if the kernel uses it."""
        return ["kv_last = tl.minimum(kv_start + BLOCK_N, SK) - 1"] if self.last else []

    @property
    def held_once(self) -> tuple[Held, ...]:
        """The tiles of K and V that are loaded before the loop over query heads."""
        return () if self.held_by_head else self.operands.held

    @property
    def held_by_each_head(self) -> tuple[Held, ...]:
        """The tiles that are loaded for each query head, because they depend on the head."""
        return self.operands.held if self.held_by_head else ()

    @property
    def mask_and_vectors(self) -> list[Statement]:
        """The mask, and the loads of log-sum-exp and delta. Tiles with the mask have a guard."""
        whole, guarded = (
            [assign(x, load_of_vector(x, guard)) for x in ("lse", "delta")]
            for guard in (None, self.vector_guard)
        )
        if not self.masked:
            return [*whole]
        return [If(Name("MASKED"), (*self.mask_lines, *guarded), tuple(whole))]

    @property
    def where_masked(self) -> list[Statement]:
        """The statements that apply the mask to P of a tile that has it."""
        return in_masked_tiles(self.p_masked)


@dataclass(frozen=True)
class Pair(TileBody, Recomputed, PairKernel, _Kernel):
    """A kernel for a gradient with an element for each (query, key)."""

    template: ClassVar[str] = "attention/portable/_pair.j2"

    no_specialize: str

    @property
    def address_line(self) -> Assign:
        """The statement that computes the addresses of the tile's gradient."""
        return assign(f"{self.name}_tile", self.address)


@dataclass(frozen=True)
class Diagonal(TileBody, Recomputed, DiagonalKernel, _Kernel):
    """A kernel for a gradient with an element for each distance."""

    template: ClassVar[str] = "attention/portable/_diagonal.j2"

    no_specialize: str


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
    """All portable kernels of a plan."""

    forward: Forward
    """The forward kernel. It is lowered even if no call uses it."""
    many_queries: bool
    """True if calls use the forward kernel."""
    backward: BackwardKernels | None

    @property
    def loops(self) -> dict[str, LoopKernel]:
        """The kernels that loop over tiles of a whole length, by the name of their result."""
        found = {"forward": self.forward.kernel}
        if self.backward is not None:
            found |= {"dq": self.backward.dq.kernel, "dkdv": self.backward.dkdv.kernel}
        return found


def portable_kernels(
    lowering: Lowering, at: Placement, many_queries: bool, follower: Follower | None
) -> PortableKernels:
    """Return the kernels of a plan. `many_queries`: calls use the forward kernel."""
    made = _Portable(lowering, at)
    backward = made.backward(follower) if lowering.plan.backward else None
    return PortableKernels(made.forward(), many_queries, backward)


class _Portable:
    """Build the portable kernels of one plan."""

    def __init__(self, lowering: Lowering, at: Placement) -> None:
        self.lowering, self.plan = lowering, lowering.plan
        self.at, self.exact = at, Exact(self.plan.exact)
        self.head = head_of(self.plan, lowering.tf32)
        self.no_specialize = not_specialized(
            [*lowering.sizes, *lowering.open_sizes, *lowering.runtime]
        )
        self.sink = sink_load() if self.plan.spec.sinks else None

    def forward(self) -> Forward:
        state = ["m_i", "l_i", *(f"acc{c.tag}" for c in self.plan.v_chunks)]
        kernel = loop_kernel(self.lowering, self.plan.forward, state)
        params = forward_params(self.lowering, kernel)
        bases = (kernel.body, kernel, params)
        return self._filled(Forward, *bases, kernel=kernel, launched=params, sink_load=self.sink)

    def backward(self, follower: Follower | None) -> BackwardKernels:
        plan = self.plan
        assert plan.dq is not None
        assert plan.dkdv is not None
        return BackwardKernels(
            delta=self.delta(follower),
            dq=self.dq(plan.dq),
            dkdv=self.dkdv(plan.dkdv),
            pairs=[self.pair(loop) for loop in plan.pairs],
            diagonals=[self.diagonal(loop) for loop in plan.diagonals],
        )

    def delta(self, follower: Follower | None) -> Delta:
        counters = (
            [Param("counter_ptr", "counters")] if follower is not None and follower.counts else []
        )
        inside = op("({0})[:, None]", row("lt", "q_idx", "SQ"))
        params = delta_params(self.lowering, counters)
        return filled(
            Delta,
            params,
            launched=params,
            head=self.head,
            at=self.at,
            exact=self.exact,
            loads=[load_of(c, inside) for c in self.plan.v_chunks],
            rounded="_tf32(do)" if self.lowering.tf32 else "do.to(tl.float32)",
            sink=self.sink,
            follower=follower,
        )

    def dq(self, loop: TileLoop) -> Dq:
        own = [f"dq{c.tag}" for c in self.plan.qk_chunks]
        kernel = loop_kernel(self.lowering, loop, [*own, *accumulators(loop)])
        params = dq_params(self.lowering, kernel)
        return self._filled(Dq, kernel.body, kernel, params, kernel=kernel, launched=params)

    def dkdv(self, loop: TileLoop) -> DkDv:
        own = [f"dk{c.tag}" for c in self.plan.qk_chunks] + [
            f"dv{c.tag}" for c in self.plan.v_chunks
        ]
        kernel = loop_kernel(self.lowering, loop, [*own, *accumulators(loop)])
        params = dkdv_params(self.lowering, kernel)
        return self._filled(DkDv, kernel.body, kernel, params, kernel=kernel, launched=params)

    def pair(self, loop: TileLoop) -> Pair:
        kernel = pair_kernel(self.lowering, loop)
        params = pair_params(self.lowering, kernel)
        return self._filled(Pair, kernel, kernel.tile, kernel.tile.body, params, launched=params)

    def diagonal(self, loop: TileLoop) -> Diagonal:
        kernel = diagonal_kernel(self.lowering, loop)
        params = diagonal_params(self.lowering, kernel.tile)
        bases = (kernel, kernel.tile, kernel.tile.body, params)
        return self._filled(Diagonal, *bases, launched=params)

    def _filled(self, cls: type[T], *bases: object, **own: object) -> T:
        shared = {"head": self.head, "at": self.at, "exact": self.exact}
        return filled(cls, *bases, **shared, no_specialize=self.no_specialize, **own)
