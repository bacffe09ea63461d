"""The parts of the decoding kernels in the files of a spec."""

from __future__ import annotations

from collections.abc import Sequence

from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.schedules.decode.kernels import decode_kernels
from kgen.kernels.attention.schedules.decode.launcher import launcher_of
from kgen.kernels.attention.schedules.decode.plan import MOST_QUERIES, decodes, plan_decode
from kgen.kernels.attention.targets.triton.made import Branch, Choice, InFile, Made, Needs, Planned
from kgen.kernels.attention.targets.triton.opening import table_of


def made(planned: Planned, ahead: Sequence[Made]) -> Made:
    """Return the parts of the decoding kernels, if the spec has them."""
    if not decodes(planned.loaded):
        return Made()
    plan = plan_decode(planned.loaded)
    lowering = Lowering(plan.attention)
    kernels = decode_kernels(plan, lowering)
    launcher = launcher_of(kernels, planned.op, planned.interface.kv_sizes())
    parts = InFile(modules=("functools",), forward=(kernels.template,), launcher=(launcher,))
    few, many = f"SQ <= {MOST_QUERIES}", f"SQ > {MOST_QUERIES}"
    return Made(
        together=parts,
        alone=parts,
        helpers=frozenset(lowering.helpers),
        forward_tables=(
            table_of("_DECODE_TILES", {chip: [tile] for chip, tile in plan.tiles.items()}),
        ),
        needs=Needs(decodes=True, multiprocessors=True),
        branch=Branch("_decode", few, takes_rest=plan.alone, leaves=many if plan.alone else ""),
        choice=Choice(
            kind="decode",
            words='"decode": kernels that can split the keys over programs'
            + (
                ", for few queries or if no other kernels can run"
                if plan.alone
                else f", for at most {MOST_QUERIES} queries"
            ),
            few=f"q.shape[2] <= {MOST_QUERIES}",
            own='"decode"',
            takes_rest=plan.alone,
        ),
    )
