"""The page of `kgen explain` for attention: the steps from a spec's expressions to its kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kgen.kernels.attention.explaining.chips import kernels, tiles
from kgen.kernels.attention.explaining.explained import explained_by
from kgen.kernels.attention.explaining.expressions import as_read, formula, places, softmax
from kgen.kernels.attention.explaining.facts import facts
from kgen.kernels.attention.explaining.gradients import gradients
from kgen.kernels.attention.explaining.operations import operations
from kgen.kernels.attention.explaining.ranks import over_ranks
from kgen.kernels.attention.explaining.visits import drawn, promises, visits
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.plan.positions import positioned
from kgen.kernels.attention.plan.promises import searchable
from kgen.pages.model import Block, Drawing, Page, Section
from kgen.spec.load import Loaded


def explain(loaded: Loaded, drawing: Drawing | None = None) -> Page:
    """Return the page on the steps from a spec to its kernels.

    `drawing` adds grids of the visited tiles, and with `ranks` the sharding over several ranks.
    Raise `KgenError` if its lengths or parameters do not fit the spec.
    """
    plan, written = plan_attention(loaded), positioned(loaded).trees
    explained = explained_by(loaded, plan)
    sections: Mapping[str, Iterable[Block]] = {
        "Formula": formula(plan, written),
        "As read": as_read(plan, written),
        "Softmax": softmax(plan),
        "Where it is computed, in the forward kernel": places(plan.forward),
        "Operations for each (query, key)": operations(plan, written),
        "Tiles that are visited": [*visits(plan), *promises(searchable(loaded))],
        **({"Tiles of queries (down) by keys (across)": drawn(plan, drawing)} if drawing else {}),
        **({"Over several ranks": over_ranks(plan, drawing)} if drawing and drawing.ranks else {}),
        **{title: blocks for of in explained for title, blocks in of.sections.items()},
        "Gradients": gradients(plan),
        "Sizes of tiles": tiles(explained),
        "Kernels by chip": kernels(plan, explained),
    }
    return Page(
        plan.spec.name,
        plan.spec.summary.on_terminal(),
        tuple(Section(title, tuple(blocks)) for title, blocks in sections.items()),
        facts(plan, written, explained),
    )
