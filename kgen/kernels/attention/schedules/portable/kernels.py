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
    KernelParams,
    Load,
    LoopKernel,
    Param,
    Ranges,
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
from kgen.kernels.attention.lowered.row_max import (
    RowResults,
    in_words,
    largest_followed,
    largest_started,
    row_results_of,
)
from kgen.kernels.attention.plan.model import TileLoop
from kgen.kernels.attention.targets.triton.exact import Exact
from kgen.kernels.attention.targets.triton.made import Follower
from kgen.kernels.attention.targets.triton.placement import DeltaRows, Placement
from kgen.kernels.attention.targets.triton.shared import (
    Head,
    dead_rows,
    head_of,
    not_specialized,
    sink_load,
)
from kgen.targets.code import Assign, Code, If, Name, Run, Statement, assign, op, row, text, total
from kgen.targets.template import Template, filled
from kgen.targets.triton.printer import column

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
class _TileLoop(Template):
    """The beginning of a loop over tiles of the inner side, with the start of each tile."""

    name: str
    """The prefix of the names of the inner side."""
    block: str
    """Name of the number of rows of a tile."""


@dataclass(frozen=True)
class ListedTiles(_TileLoop):
    """The loop over the tiles of listed blocks."""

    template: ClassVar[str] = "attention/portable/_listed_tiles.j2"


@dataclass(frozen=True)
class RotatedTiles(_TileLoop):
    """The loop over the tiles of a range from a tile on that depends on the program."""

    template: ClassVar[str] = "attention/portable/_rotated_tiles.j2"

    end: str
    """The end of the range without its gap."""


@dataclass(frozen=True)
class Tiles(_TileLoop):
    """The loop over the tiles of a range."""

    template: ClassVar[str] = "attention/portable/_tiles.j2"

    end: str
    """The end of the range without its gap."""
    counted: str
    """The variable of the loop."""
    start: list[Statement]
    """The statement that assigns the start of a tile, if it is not the variable of the loop."""


def gap_before(start: str) -> Code:
    """Return the length of the gap, if it is before a tile. It is 0 in a loop without the mask."""
    return row("where", row("lt", start, "gap_lo"), 0, "gap")


AnyTiles = ListedTiles | RotatedTiles | Tiles


def tile_loop(kernel: LoopKernel) -> AnyTiles:
    """Return the beginning of a kernel's loop."""
    ranges, name, block = kernel.ranges, kernel.inner.name, kernel.inner.block
    if ranges.listed:
        return ListedTiles(name, block)
    end = f"{name}_hi - gap" if ranges.gapped else f"{name}_hi"
    if ranges.rotated:
        return RotatedTiles(name, block, end)
    if ranges.gapped:
        start = row("add", "start", gap_before("start"))
        return Tiles(name, block, end, "start", [assign(f"{name}_start", start)])
    return Tiles(name, block, end, f"{name}_start", [])


@dataclass(frozen=True)
class _Kernel(Head, Exact, KernelParams, Template):
    """The fields that all portable kernels share."""

    launched: KernelParams
    """The parameters as one object, for the launcher."""


@dataclass(frozen=True)
class _OfLoop(TileBody, Ranges, LoopKernel, Placement, _Kernel):
    """The fields of kernels that loop over tiles."""

    kernel: LoopKernel
    no_specialize: str
    tile_loop: AnyTiles
    """The beginning of the loop over tiles."""

    @property
    def gap_skipped(self) -> list[Statement]:
        """The statement by which a loop from another tile than the first skips its gap."""
        start = f"{self.inner.name}_start"
        skips = self.gapped and self.rotated
        return [Assign((start,), (gap_before(start),), "+=")] if skips else []

    @property
    def last_query(self) -> list[str]:
        """The statement that computes the last query of a tile, if the kernel uses it."""
        return ["q_last = tl.minimum(q_start + BLOCK_M, SQ) - 1"] if self.last else []


@dataclass(frozen=True)
class Forward(RowResults, _OfLoop):
    """The forward kernel."""

    template: ClassVar[str] = "attention/portable/_forward.j2"
    optional_fields: ClassVar[tuple[str, ...]] = (*RowResults.optional_fields, "stored_words")

    sink_load: Code | None
    """The load of a head's sink; None without sinks."""

    @property
    def held(self) -> list[Statement]:
        """The loads of the tile of Q that a program holds, and the start of its largest logits."""
        start = [largest_started() for _ in self.top]
        return [*self.operands.held.statements, *start]

    @property
    def stored_words(self) -> str:
        """The results of the kernel, in words."""
        return in_words("`out`", self.row_results)

    @property
    def where_masked(self) -> list[Statement]:
        """The statements that apply the mask to the logits of a tile that has it, and follow its
        largest logits.
        """
        largest = [largest_followed(self.logits, self.scaled) for _ in self.top]
        return [*in_masked_tiles(self.logits_masked), *largest]

    @property
    def on_dead_rows(self) -> str:
        """The results of rows without a visible key, for a comment."""
        return dead_rows(sinks=self.sink_load is not None)

    @property
    def streamed_k(self) -> list[Statement]:
        """The loads of a tile of K, for which the scores wait."""
        return self.operands.streams[0].statements

    @property
    def streamed_v(self) -> list[Statement]:
        """The loads of a tile of V."""
        return self.operands.streams[1].statements


@dataclass(frozen=True)
class Delta(DeltaRows, _Kernel):
    """The kernel of delta, the first of the backward pass."""

    template: ClassVar[str] = "attention/portable/_delta.j2"

    packed: bool
    loads: list[Load]
    """The columns of out and dO."""
    summed: Assign
    """The statement that sums the products of out and dO over all columns."""
    sink: Code | None
    follower: Follower | None
    """The kernels that may begin before this kernel ends (programmatic dependent launch)."""

    @property
    def options(self) -> list[str]:
        """Further compile-time parameters."""
        return ["START_NEXT: tl.constexpr"] if self.follower is not None else []

    @property
    def counters_reset(self) -> list[Statement]:
        """The statements by which the first program resets these counters."""
        stores = tuple(
            Run(op("tl.store({0}, 0)", at)) for at in ("counter_ptr", row("add", "counter_ptr", 1))
        )
        counts = self.follower is not None and self.follower.counts
        note = "the next kernels take their tiles from these counters, from 0 up"
        return [If(text("tl.program_id(0) == 0"), stores, note=note)] if counts else []


@dataclass(frozen=True)
class _OfBackward(Gradients, _OfLoop):
    """The base of the kernels of dq, and of dk and dv."""

    @property
    def streamed(self) -> list[Statement]:
        """The loads of the two tensors of which the loop loads tiles."""
        return self.operands.streams[0].statements


@dataclass(frozen=True)
class Dq(_OfBackward):
    """The kernel of dq."""

    template: ClassVar[str] = "attention/portable/_dq.j2"

    @property
    def held(self) -> list[Statement]:
        """The loads of the tiles of Q and dO that a program holds."""
        return self.operands.held.statements

    @property
    def where_masked(self) -> list[Statement]:
        """The statements that apply the mask to P of a tile that has it."""
        note = "mask p, not the scores: in a row without keys, lse is -inf, and -inf - lse is NaN"
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
    def held_once(self) -> list[Statement]:
        """The loads of the tiles of K and V before the loop over query heads."""
        return [] if self.held_by_head else self.operands.held.statements

    @property
    def held_by_each_head(self) -> list[Statement]:
        """The loads of these tiles for each query head, if they depend on the head."""
        return self.operands.held.statements if self.held_by_head else []

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
class Pair(TileBody, Recomputed, PairKernel, Placement, _Kernel):
    """A kernel for a gradient with an element for each (query, key)."""

    template: ClassVar[str] = "attention/portable/_pair.j2"

    no_specialize: str

    @property
    def address_line(self) -> Assign:
        """The statement that computes the addresses of the tile's gradient."""
        return assign(f"{self.name}_tile", self.address)

    @property
    def store(self) -> Statement:
        """The store of the tile. Only a tile that is not inside both tensors has a guard."""
        tile = f"{self.name}_tile"
        whole = Run(op("tl.store({0}, {1})", tile, self.name))
        if self.inside is None or self.store_guard is None:
            return whole
        guarded = Run(op("tl.store({0}, {1}, mask={2})", tile, self.name, self.store_guard))
        return If(Name("whole"), (whole,), (guarded,))


@dataclass(frozen=True)
class Diagonal(TileBody, Recomputed, DiagonalKernel, Placement, _Kernel):
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
        spec = self.plan.spec
        # The running maximum of a row with a sink may be the sink, which is not a score.
        results = RowResults(row_results_of(spec, apart=spec.sinks))
        state = ["m_i", "l_i", *results.top, *(f"acc{c.tag}" for c in self.plan.v_chunks)]
        kernel = loop_kernel(self.lowering, self.plan.forward, state)
        params = forward_params(self.lowering, kernel)
        own = {"sink_load": self.sink, "row_results": results.row_results}
        return self._of_loop(Forward, kernel, params, **own)

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
        params = delta_params(self.lowering, counters)
        return filled(
            Delta,
            self.at.delta_rows,
            params,
            self.head,
            self.exact,
            packed=self.at.packed,
            launched=params,
            loads=[load_of(c, column("q_live")) for c in self.plan.v_chunks],
            summed=assign("delta", total(*(self._row_sum(c.tag) for c in self.plan.v_chunks))),
            sink=self.sink,
            follower=follower,
        )

    def _row_sum(self, tag: str) -> Code:
        """Return the row sums of out * dO for a block of columns.

        dO is rounded as in dP = dO @ V^T, from which delta is subtracted.
        """
        rounded = op("_tf32({0})" if self.lowering.tf32 else "{0}.to(tl.float32)", f"do{tag}")
        return op("tl.sum({0}.to(tl.float32) * {1}, 1)", f"o{tag}", rounded)

    def dq(self, loop: TileLoop) -> Dq:
        own = [f"dq{c.tag}" for c in self.plan.qk_chunks]
        kernel = loop_kernel(self.lowering, loop, [*own, *accumulators(loop)])
        params = dq_params(self.lowering, kernel)
        return self._of_loop(Dq, kernel, params, kernel.gradients)

    def dkdv(self, loop: TileLoop) -> DkDv:
        own = [f"dk{c.tag}" for c in self.plan.qk_chunks] + [
            f"dv{c.tag}" for c in self.plan.v_chunks
        ]
        kernel = loop_kernel(self.lowering, loop, [*own, *accumulators(loop)])
        params = dkdv_params(self.lowering, kernel)
        return self._of_loop(DkDv, kernel, params, kernel.gradients)

    def pair(self, loop: TileLoop) -> Pair:
        kernel = pair_kernel(self.lowering, loop)
        params = pair_params(self.lowering, kernel)
        bases = (kernel, kernel.tile, kernel.tile.body, params, self.at)
        return self._filled(Pair, *bases, launched=params)

    def diagonal(self, loop: TileLoop) -> Diagonal:
        kernel = diagonal_kernel(self.lowering, loop)
        params = diagonal_params(self.lowering, kernel.tile)
        bases = (kernel, kernel.tile, kernel.tile.body, params, self.at)
        return self._filled(Diagonal, *bases, launched=params)

    def _of_loop(
        self, cls: type[T], kernel: LoopKernel, params: KernelParams, *more: object, **own: object
    ) -> T:
        """Return a kernel that loops over tiles."""
        bases = (*more, kernel.body, kernel.ranges, kernel, params, self.at)
        shared = {"kernel": kernel, "launched": params, "tile_loop": tile_loop(kernel)}
        return self._filled(cls, *bases, **shared, **own)

    def _filled(self, cls: type[T], *bases: object, **own: object) -> T:
        bases = (*bases, self.head, self.exact)
        return filled(cls, *bases, no_specialize=self.no_specialize, **own)
