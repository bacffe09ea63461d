"""The page of `kgen explain` for chunk_output."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from kgen.expr.operations import READ, operations
from kgen.expr.unparse import show
from kgen.kernels.chunk_output.plan.planning import (
    ChunkOutputPlan,
    bytes_per_token,
    plan_chunk_output,
)
from kgen.kernels.chunk_output.plan.tiles import tile_tables
from kgen.pages.model import (
    Block,
    Code,
    Drawing,
    Line,
    Lines,
    Page,
    Prose,
    Section,
    Table,
    quoting,
    words,
)
from kgen.pages.tables import counts
from kgen.spec.load import Loaded


def explain_chunk_output(loaded: Loaded, _drawing: Drawing | None = None) -> Page:
    """Build the page: formula, decay, operations, memory traffic, gradients and tiles.

    It has no drawing.
    """
    plan = plan_chunk_output(loaded)
    sections = {
        "Formula": _formula(plan),
        "Decay": _decay(plan),
        "Operations for each token of a head": _operations(plan),
        "Memory": _memory(plan),
        "Gradients": _gradients(plan),
        "Sizes of tiles": _tiles(plan),
    }
    return Page(
        plan.spec.name,
        plan.spec.summary.on_terminal(),
        tuple(Section(title, tuple(blocks)) for title, blocks in sections.items()),
        _facts(plan),
    )


def _facts(plan: ChunkOutputPlan) -> dict[str, Any]:
    """Return the fields of the JSON output, which docs/commands.md lists."""
    tables = dataclasses.asdict(tile_tables(plan.spec)).items()
    shown = {"exponent": plan.decay, "with_values": plan.exponent, "slope": plan.slope}
    return {
        "decay": None
        if plan.decay is None
        else {"base": plan.spec.gate_base}
        | {n: t if t is None else show(t) for n, t in shown.items()},
        "gates": list(plan.gates),
        "tiles": [
            {"kernel": kernel, "chip": f"sm_{chip}" if chip else None}
            | {name.lower(): value for name, value in tile.items()}
            for kernel, table in tables
            if kernel == "forward" or plan.backward
            for chip, tile in sorted(table.items(), reverse=True)
        ],
    }


def _formula(plan: ChunkOutputPlan) -> Iterator[Block]:
    base = plan.spec.gate_base
    before, between = (
        (f"{base}**c(i) * ", f"{base}**(c(i) - c(j)) * ") if plan.decay is not None else ("", "")
    )
    pairs = f"sum over j <= i of {between}(q[i] . k[j]) * v[j]"
    yield Lines((Line(f"o[i] = scale * ({before}q[i] @ state + {pairs})"),))


def _decay(plan: ChunkOutputPlan) -> Iterator[Block]:
    if plan.decay is None or plan.exponent is None:
        yield Prose(words("None: a pair of tokens counts in full, and so does the state."))
        return
    base = plan.spec.gate_base
    lines = [Line(f"c(i) = {show(plan.decay)}")]
    if plan.exponent != plan.decay:
        lines.append(Line(f"     = {show(plan.exponent)}", "with the gates' values at i and h"))
    yield Lines(tuple(lines))
    yield Prose(
        words(
            "The state is multiplied by ", Code(f"{base}**c(i)"), ", a pair j <= i by ",
            Code(f"{base}**(c(i) - c(j))"), ", subtracted first.",
        )
    )  # fmt: skip
    if plan.natural:
        yield Prose(
            words(
                "Kernels use 2^x in place of e^x: e^x is ",
                Code("2^(LOG2E * x)"),
                ", with LOG2E = log2(e).",
            )
        )


def _operations(plan: ChunkOutputPlan) -> Iterator[Block]:
    if plan.decay is None or plan.exponent is None:
        yield Prose(words("None beside the products of matrices: nothing decays."))
        return
    trees = {"c(i), as written": plan.decay, "c(i)": plan.exponent}
    trees |= {"d c / d g": plan.slope} if plan.slope is not None else {}
    columns = {name: operations([tree]) for name, tree in trees.items()}
    for found in columns.values():
        del found[READ]  # gates are loaded once, by whatever name
    yield counts(columns)
    natural = "a multiplication by LOG2E, " if plan.natural else ""
    yield Prose(
        words(f"Each pair j <= i takes a subtraction, {natural}a power and a product on top.")
    )


def _memory(plan: ChunkOutputPlan) -> Iterator[Block]:
    heads = plan.spec.heads
    h, hv = heads.qk or 1, heads.v or heads.ratio or 1
    yield Prose(
        words(
            f"For each token with H={h} and HV={hv}, every input read once and every output "
            "written once:"
        )
    )
    yield Prose(words(f"forward {bytes_per_token(plan, h, hv):,.0f} bytes"))
    if plan.backward:
        yield Prose(words(f"backward {bytes_per_token(plan, h, hv, backward=True):,.0f} bytes"))


def _gradients(plan: ChunkOutputPlan) -> Iterator[Block]:
    if not plan.backward:
        yield Prose(quoting("None: `passes` does not ask for backward."))
        return
    same = "each value is written by one program, so the bits are the same every time."
    yield Prose(words(f"Of q, k, v and the states; {same}"))
    if plan.slope is not None:
        yield Prose(words("Of g: ", Code(f"d c / d g = {show(plan.slope)}")))
    if "g_gamma" in plan.gates:
        yield Prose(words("g_gamma is a constant without a gradient."))


def _tiles(plan: ChunkOutputPlan) -> Iterator[Block]:
    tables = tile_tables(plan.spec)
    names = {"forward": tables.forward}
    names |= {"dv and dh": tables.dvdh, "dq and dk": tables.dqdk} if plan.backward else {}
    yield Prose(words("columns of q and k x columns of v, warps, pipeline stages"))
    rows = []
    for kernel, table in names.items():
        for chip, t in sorted(table.items(), reverse=True):
            place = f"sm_{chip}" if chip else "any other chip"
            sizes = f"{t.BLOCK_K} x {t.BLOCK_V}, {t.num_warps} warps, {t.num_stages} stages"
            rows.append((words(kernel), words(place), words(sizes)))
    yield Table(("kernel", "chip", "tile"), tuple(rows), plain_head=False)
