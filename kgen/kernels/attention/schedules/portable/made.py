"""The parts of portable kernels in the files of a spec."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.plan.tuned import Tile
from kgen.kernels.attention.schedules.portable.conditions import takes_many_queries
from kgen.kernels.attention.schedules.portable.kernels import PortableKernels, portable_kernels
from kgen.kernels.attention.schedules.portable.launches import launches_of
from kgen.kernels.attention.targets.triton.made import (
    Choice,
    InFile,
    Made,
    Needs,
    Planned,
    follower_of,
)
from kgen.kernels.attention.targets.triton.opening import TileTable, table_of
from kgen.targets.template import Template


def made(planned: Planned, ahead: Sequence[Made]) -> Made:
    """Return the portable kernels, which serve the calls that no earlier schedule serves."""
    many_queries = takes_many_queries(planned.plan.spec)
    follower = follower_of(of.backward for of in ahead if of.backward is not None)
    kernels = portable_kernels(planned.lowering, planned.at, many_queries, follower)
    parts = InFile(
        dependents=("gdc_launch_dependents",) if follower is not None else (),
        forward=(kernels.forward,) if many_queries else (),
        kernels=_backward(kernels),
    )
    return Made(
        together=parts,
        alone=parts,
        helpers=frozenset(planned.lowering.helpers) if many_queries else frozenset(),
        forward_tables=(table_of("_FORWARD_TILES", planned.plan.tiles.forward),)
        if many_queries
        else (),
        tables=tuple(_tables(planned.plan)),
        needs=Needs(by_tma=many_queries, many_queries=many_queries),
        launches=launches_of(kernels, planned.at),
        choice=Choice(
            kind="portable",
            words='"portable: REASON": the kernels for every chip, and why they run',
        ),
    )


def _backward(kernels: PortableKernels) -> tuple[Template, ...]:
    of = kernels.backward
    return () if of is None else (of.delta, of.dq, of.dkdv, *of.pairs, *of.diagonals)


def _tables(plan: AttentionPlan) -> Iterator[TileTable]:
    if plan.backward:
        yield table_of("_DQ_TILES", plan.tiles.dq)
        yield table_of("_DKDV_TILES", plan.tiles.dkdv)
    if plan.pairs:
        yield table_of("_PAIR_TILES", plan.tiles.pair, _without_tma)
    if plan.diagonals:
        yield table_of("_DIAGONAL_TILES", plan.tiles.diagonal, _square)


def _without_tma(tile: Tile) -> dict[str, object]:
    return {name: value for name, value in asdict(tile).items() if name != "TMA"}


def _square(tile: Tile) -> dict[str, object]:
    fields = _without_tma(tile)
    del fields["BLOCK_N"]
    return {"BLOCK": fields.pop("BLOCK_M")} | fields
