"""The C launches of the portable kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

from kgen.kernels.attention.lowered.model import Operands
from kgen.kernels.attention.schedules.portable.conditions import takes_many_queries
from kgen.kernels.attention.schedules.portable.kernels import BackwardKernels, portable_kernels
from kgen.kernels.attention.targets.triton.native_calls import (
    Calls,
    PortableLaunch,
    Prepared,
    Tiled,
    Way,
)
from kgen.kernels.attention.targets.triton.native_learned import LearnedCalls, learned_calls
from kgen.kernels.attention.targets.triton.native_tensors import Tensors
from kgen.targets.native import Tiles
from kgen.targets.template import Template
from kgen.targets.triton import tables


@dataclass(frozen=True)
class PortableForward(Template):
    """The launch of the forward kernel."""

    template: ClassVar[str] = "attention/portable/_forward_calls.j2"

    launch: PortableLaunch
    group: int
    """Heads that programs process at a time."""


def calls(of: Prepared, others: Sequence[Calls]) -> Calls:
    """Return the launches of the portable kernels."""
    many_queries = takes_many_queries(of.plan.spec)
    kernels = portable_kernels(of.lowering, of.at, many_queries, None)
    loops = {name: loop.operands for name, loop in kernels.loops.items()}
    if not many_queries:
        del loops["forward"]
    launches = _launches(loops)
    learned = _learned(of.tensors, kernels.backward) if kernels.backward is not None else None
    tiles = of.plan.tiles
    named = {"forward": tiles.forward, "dq": tiles.dq, "dkdv": tiles.dkdv}
    found = Calls(
        launches=launches,
        learned=learned,
        tiles=tuple(
            Tiles(
                f"{name}_tiles",
                [(c, asdict(t)) for c, t in tables.rows(table)],
                kernel=f"_{name}_kernel",
            )
            for name, table in named.items()
            if name in launches
        ),
        tiled=bool(launches),
        portable=bool(launches),
    )
    if not many_queries:
        return found
    forward = PortableForward(launches["forward"], of.at.group)
    return replace(found, functions=(forward,), way=Way("launch_forward(a, &p, v, stream)"))


def _launches(loops: Mapping[str, Operands]) -> dict[str, PortableLaunch]:
    """Return the launches of kernels, by the name of their result."""
    most = max((len(of.descriptors) for of in loops.values()), default=0)
    return {
        name: PortableLaunch(
            by_tma=" && ".join(f"by_tma(&a->{x})" for x in of.tensors),
            descs=tuple(
                Tiled(d.name, d.tensor, d.rows, d.columns, at)
                for at, d in enumerate(of.descriptors)
            ),
            tiles=most,
        )
        for name, of in loops.items()
    }


def _learned(tensors: Tensors, kernels: BackwardKernels) -> LearnedCalls | None:
    pairs = [(x.name, x.shared.programs) for x in kernels.pairs]
    return learned_calls(tensors.learned, pairs, [x.tile.name for x in kernels.diagonals])
