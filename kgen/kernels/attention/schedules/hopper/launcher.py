"""Templates of the functions that launch Hopper kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.lowered.row_max import RowResults
from kgen.kernels.attention.schedules.hopper.kernels import (
    BackwardOperands,
    Common,
    DkdvKernel,
    ForwardKernel,
    Kernels,
)
from kgen.kernels.attention.schedules.hopper.operands import KernelOperands
from kgen.kernels.attention.schedules.hopper.plan import HALF, HopperTile
from kgen.kernels.attention.schedules.hopper.portable import Call
from kgen.kernels.attention.schedules.hopper.reads import Columns, Pages, columns_of
from kgen.kernels.attention.targets.triton.placement import programs
from kgen.targets.code import GLUON
from kgen.targets.template import Template, filled


@dataclass(frozen=True)
class Launch:
    """The launch of a kernel."""

    kernel: str
    programs: str
    """The number of tiles."""
    given: list[str]
    """The arguments before the problem arguments."""
    options: list[str]
    """The keyword arguments."""


@dataclass(frozen=True)
class ForwardLauncher(RowResults, Call, Common, Template):
    """The function that launches forward."""

    template: ClassVar[str] = "attention/hopper/_forward_launcher.j2"
    optional_fields: ClassVar[tuple[str, ...]] = (*RowResults.optional_fields, "stored_words")
    language: ClassVar[str] = GLUON

    tile: HopperTile
    columns: Columns
    pages: Pages
    rope_descs: list[str]
    """The statements that build the descriptors of rope columns."""
    launch: Launch

    def launch_functions(self) -> Iterable[str]:
        return ("_launch", "_multiprocessors", *([] if self.packed else ["_cdiv"]))

    @property
    def stored_words(self) -> str:
        """The results, for the docstring."""
        if not self.row_results:
            return "`out`, and `lse` (float32, base 2) if store_lse"
        found = [
            "`out`",
            "`lse` if store_lse",
            *(f"and `{x}` if not None" for x in self.row_tensors),
        ]
        return f"{', '.join(found)} (float32, base 2)"

    @property
    def dependent(self) -> list[str]:
        """The option by which the kernel starts before the previous one ends."""
        return ["launch_pdl=True"] if self.dynamic else []


@dataclass(frozen=True)
class OneKernel(Common, Template):
    """The condition for one backward kernel, when it is faster than two, and the sums for it."""

    template: ClassVar[str] = "attention/hopper/_one_kernel.j2"
    language: ClassVar[str] = GLUON

    params: str
    given: str
    enough: str
    lines_of_sizes: list[str]
    programs: str
    """Number of tiles of the sums of dq."""
    half: int = HALF

    def launch_functions(self) -> Iterator[str]:
        if self.dynamic:
            yield "_multiprocessors"
        if not self.packed:
            yield "_cdiv"


@dataclass(frozen=True)
class BackwardLauncher(BackwardOperands, Call, Common, Template):
    """The functions that launch the backward kernels."""

    template: ClassVar[str] = "attention/hopper/_backward_launcher.j2"
    language: ClassVar[str] = GLUON

    one_kernel: OneKernel | None
    prepared: list[str]
    """The lines before the first launch."""
    of_keys: Launch
    of_queries: Launch | None
    half: int = field(default=HALF, kw_only=True)

    def launch_functions(self) -> Iterable[str]:
        return ("_launch", "_multiprocessors", *([] if self.packed else ["_cdiv"]))


@dataclass(frozen=True)
class Launcher(Common, Template):
    """The functions that launch Hopper kernels."""

    template: ClassVar[str] = "attention/hopper/_launcher.j2"
    language: ClassVar[str] = GLUON

    columns: Columns
    forward: ForwardLauncher | None
    backward: BackwardLauncher | None

    @property
    def axes(self) -> str:
        """The dimensions of a tensor without its columns."""
        return "T, H" if self.packed else "B, H, S"

    @property
    def shape_and_strides(self) -> str:
        """The arguments of a descriptor for the shape and the strides of a tensor."""
        return "*_by_ends(x)" if self.packed else "x.shape, x.stride()"

    @property
    def ones(self) -> list[str]:
        """The size of a tile in the dimensions before its rows."""
        return ["1"] * (3 if self.packed else 2)


def launcher_of(hopper: Kernels, kernels: Lowering, call: Call) -> Launcher:
    """Return the template of the functions that launch the kernels of a plan."""
    common, columns = hopper.common, columns_of(hopper.plan, kernels.spec.head_dim.v)
    forward, backward = None, None
    if hopper.forward is not None:
        forward = _forward(hopper, hopper.forward, kernels, call, columns)
    if hopper.dkdv is not None:
        backward = _backward(hopper, hopper.dkdv, kernels, call)
    return filled(Launcher, common, columns=columns, forward=forward, backward=backward)


def _forward(
    hopper: Kernels, forward: ForwardKernel, kernels: Lowering, call: Call, columns: Columns
) -> ForwardLauncher:
    common, rows = hopper.common, {"q": f"BLOCK_M // {hopper.common.consumers}", "k": "BLOCK_N"}
    group = max(hopper.plan.heads, call.group)
    blocks = ["BLOCK_M=BLOCK_M", "BLOCK_N=BLOCK_N"]
    options = [f"GROUP={group}", *blocks, f"SLOTS={forward.tile.SLOTS}"]
    return filled(
        ForwardLauncher,
        call,
        common,
        row_results=forward.row_results,
        tile=forward.tile,
        columns=columns,
        pages=forward.pages,
        rope_descs=[
            f"{x}_rope_desc = _gluon_tiles({x}[..., {common.width}:], {n}, {common.rope})"
            for x, n in rows.items()
            if common.rope
        ],
        launch=Launch(
            kernel="_forward_hopper_kernel",
            programs=programs(kernels.packed, kernels.plan.grouped, "q", "BLOCK_M"),
            given=forward.operands.given,
            options=["STORE_LSE=store_lse", *forward.row_stores, *options, "num_warps=4"],
        ),
    )


def _backward(hopper: Kernels, dkdv: DkdvKernel, kernels: Lowering, call: Call) -> BackwardLauncher:
    packed, grouped = kernels.packed, kernels.plan.grouped
    dq, fused = hopper.dq, hopper.fused
    tiles = programs(packed, grouped, "kv", str(dkdv.tile.BLOCK_N))
    of_keys = _launch("_dkdv_hopper_kernel", tiles, dkdv.operands, dkdv.tile, call)
    if fused is not None:
        slots = f"{fused.tile.SLOTS} if in_one else {dkdv.tile.SLOTS}"
        of_keys = _launch("_backward_hopper_kernel", tiles, fused.operands, fused.tile, call, slots)
        of_keys.options.insert(0, "DQ=in_one")
    of_queries = None
    if dq is not None:
        tiles = programs(packed, grouped, "q", str(2 * HALF))
        of_queries = _launch("_dq_hopper_kernel", tiles, dq.operands, dq.tile, call)
    return filled(
        BackwardLauncher,
        hopper.backward,
        call,
        hopper.common,
        one_kernel=_one_kernel(hopper, kernels) if fused is not None else None,
        prepared=_prepared(hopper, dkdv),
        of_keys=of_keys,
        of_queries=of_queries,
    )


def _launch(
    kernel: str, tiles: str, operands: KernelOperands, tile: HopperTile, call: Call, slots: str = ""
) -> Launch:
    sizes = {
        "GROUP": call.group,
        "BLOCK_M": tile.BLOCK_M,
        "BLOCK_N": tile.BLOCK_N,
        "SLOTS": slots or tile.SLOTS,
    }
    options = [f"{name}={value}" for name, value in sizes.items()]
    return Launch(kernel, tiles, operands.given, [*options, "num_warps=4"])


def _prepared(hopper: Kernels, dkdv: DkdvKernel) -> list[str]:
    """Return the lines before the first launch: the choice of one kernel, or more descriptors."""
    if hopper.fused is not None:
        return ["in_one = dq_sum is not None"]
    common, lines = hopper.common, list[str]()
    if common.rope:
        tiles = f"_gluon_tiles(x[..., {common.width}:], {HALF}, {common.rope})"
        descs = "q_rope_desc, k_rope_desc, dq_rope_desc, dk_rope_desc"
        lines.append(f"{descs} = ({tiles} for x in (q, k, dq, dk))")
    if dkdv.tile.BLOCK_M < HALF:
        # These tiles have fewer queries than the descriptor that the kernels share.
        q, do = (f"_gluon_tiles({x}, {dkdv.tile.BLOCK_M})" for x in ("q", "dout"))
        lines.append(f"short_q_desc, short_do_desc = {q}, {do}")
    return lines


def _one_kernel(hopper: Kernels, kernels: Lowering) -> OneKernel:
    """Return the condition for one backward kernel, when it is faster than two.

    Its zeros and sums cost the same for every query, even if it sees few keys. If tiles differ in
    length, two kernels are better with few tiles: dq fills the multiprocessors that the kernel of
    dk and dv leaves idle.
    """
    enough, grouped = f"SK >= {hopper.plan.least_keys}", kernels.plan.grouped
    params = given = "SK"
    sizes = "SK = k.shape[2]"
    if hopper.dynamic:
        tiles = programs(kernels.packed, grouped, "kv", str(2 * HALF))
        params, given = "SK, n_tiles, device", f"SK, {tiles}, q.device"
        enough += " and 2 * n_tiles >= 3 * _multiprocessors(device)"
        sizes = "HKV, SK = k.shape[1], k.shape[2]" if grouped else sizes
    sums = programs(kernels.packed, grouped, "q", str(HALF))
    return filled(
        OneKernel,
        hopper.common,
        params=params,
        given=given,
        enough=enough,
        lines_of_sizes=[sizes],
        programs=sums,
    )
