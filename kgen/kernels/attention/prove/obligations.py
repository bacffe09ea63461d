"""The obligations of an attention spec: those of each kernel that its files have, for each size of tile."""

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
"""Which pairs are computed, and what is computed of them."""


def of_pairs(loaded: Loaded) -> Iterator[Obligation]:
    """What is to be proved before the files of a spec are written: which pairs count, once each, and their scores."""
    return obligations(loaded, PAIRS)


def obligations(loaded: Loaded, extent: Extent = ALL) -> Iterator[Obligation]:
    """What is to be proved of the files of a spec."""
    loaded = apart(loaded)
    # Kernels that more calls take come first.
    for schedule in reversed(SCHEDULES):
        if schedule.obligations is not None:
            yield from schedule.obligations(loaded, extent)
    plan = plan_attention(loaded)
    if plan.block_mask is not None:
        yield from of_lists(loaded, plan, Lowering(plan), extent)
