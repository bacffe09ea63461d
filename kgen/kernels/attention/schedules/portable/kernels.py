"""The portable kernels, with the values that their templates print."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.attention.lowered.kernels import accumulators, loop_kernel
from kgen.kernels.attention.lowered.loads import load_of
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.lowered.model import (
    Gradients,
    KernelParams,
    Load,
    LoopKernel,
    Param,
    Stream,
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
from kgen.targets.code import Assign, Code, assign, op, row
from kgen.targets.template import Template


@dataclass(frozen=True)
class Forward(Template):
    """The forward kernel."""

    template: ClassVar[str] = "attention/portable/_forward.j2"

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
        """The results of rows without a visible key, for a comment."""
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

    template: ClassVar[str] = "attention/portable/_delta.j2"

    params: KernelParams
    head: Head
    at: Placement
    exact: Exact
    loads: list[Load]
    """The columns of out and dO."""
    rounded: str
    """dO as rounded as in dP = dO @ V^T, from which delta is subtracted."""
    sink: Code | None
    follower: Follower | None
    """The kernels that may begin before this kernel ends (programmatic dependent launch)."""

    @property
    def options(self) -> list[str]:
        """Further compile-time parameters."""
        return [f"{of.flag}: tl.constexpr" for of in (self.follower,) if of is not None]

    @property
    def counts(self) -> bool:
        """True if the following kernels count their tiles."""
        return self.follower is not None and self.follower.counts


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
        """The two tensors that the loop loads tile by tile."""
        return self.kernel.operands.streams[0]

    @property
    def gradients(self) -> Gradients:
        """The gradients that a tile adds to."""
        assert self.kernel.gradients is not None
        return self.kernel.gradients


@dataclass(frozen=True)
class Dq(_OfBackward):
    """The kernel of dq."""

    template: ClassVar[str] = "attention/portable/_dq.j2"


@dataclass(frozen=True)
class DkDv(_OfBackward):
    """The kernel of dk and dv."""

    template: ClassVar[str] = "attention/portable/_dkdv.j2"


@dataclass(frozen=True)
class Pair(Template):
    """A kernel for a gradient with an element for each (query, key)."""

    template: ClassVar[str] = "attention/portable/_pair.j2"

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

    template: ClassVar[str] = "attention/portable/_diagonal.j2"

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
    """The forward kernel, lowered even if no call uses it."""
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
    """Makes the kernels of one plan."""

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
        return Forward(
            kernel, params, self.head, self.at, self.exact, self.no_specialize, self.sink
        )

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
        return Delta(
            params=delta_params(self.lowering, counters),
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
        return Dq(kernel, params, self.head, self.at, self.exact, self.no_specialize)

    def dkdv(self, loop: TileLoop) -> DkDv:
        own = [f"dk{c.tag}" for c in self.plan.qk_chunks] + [
            f"dv{c.tag}" for c in self.plan.v_chunks
        ]
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
