"""The obligations of an attention spec: of each kernel in its files, for each tile shape."""

from __future__ import annotations

from collections.abc import Iterator

from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.prove.block_lists import of_lists
from kgen.kernels.attention.prove.own_names import apart
from kgen.kernels.attention.prove.setting import ALL, Extent
from kgen.kernels.attention.schedules import SCHEDULES
from kgen.prove.obligations import Obligation
from kgen.spec.load import Loaded

PAIRS = Extent(memory=False, values=False)
"""The extent of proofs before a file is written: pairs in all tile shapes, the rest in one."""


def of_pairs(loaded: Loaded) -> Iterator[Obligation]:
    """Yield the obligations to decide before files are written: pairs, each once, and their
    scores.
    """
    return obligations(loaded, PAIRS)


def obligations(loaded: Loaded, extent: Extent = ALL) -> Iterator[Obligation]:
    """Yield the obligations of the files of a spec."""
    loaded = apart(loaded)
    # Kernels that serve more calls come first.
    for schedule in reversed(SCHEDULES):
        if schedule.obligations is not None:
            yield from schedule.obligations(loaded, extent)
    plan = plan_attention(loaded)
    if plan.block_mask is not None:
        yield from of_lists(loaded, plan, Lowering(plan), extent)
