"""Which chips have which kernels and why not, and the tiles of each."""

from __future__ import annotations

from collections.abc import Iterator

from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.plan.tuned import Tile
from kgen.kernels.attention.schedules.hopper.conditions import without_kernels
from kgen.kernels.attention.schedules.hopper.plan import HopperPlan, plan_hopper
from kgen.pages.model import Block, Prose, Table, Words, quoting, words

HOPPER = "sm_90"


def tiles(plan: AttentionPlan) -> Iterator[Block]:
    """The table of tiles that a launcher chooses from."""
    tables = {"forward": plan.tiles.forward}
    if plan.backward:
        tables |= {"dq": plan.tiles.dq, "dk and dv": plan.tiles.dkdv}
    tables |= {"pairs": plan.tiles.pair} if plan.pairs else {}
    tables |= {"diagonals": plan.tiles.diagonal} if plan.diagonals else {}
    yield _said("queries x keys, warps, pipeline stages; TMA where the strides of the tensors allow it")
    rows = [
        (kernel, chip_name(chip), _tile(tile))
        for kernel, table in tables.items()
        for chip in sorted(table, reverse=True)
        for tile in table[chip]
    ]
    hopper = plan_hopper(plan)
    rows += _on_hopper(hopper) if hopper is not None else ()
    cells = tuple(tuple(map(words, row)) for row in rows)
    yield Table(("kernel", "chip", "tile"), cells, plain_head=False)
    if hopper is not None:
        compute = "two" if hopper.forward is None or hopper.forward.chained else "three or two"
        yield _said(
            f"Where TMA can load the tensors, {HOPPER} has kernels of its own: one warpgroup loads, {compute} compute."
        )
        idioms = hopper.idioms.values()
        if any(found.bias for found in idioms):
            yield _said(
                "The bias grows by the same from key to key: it is where their products of queries and keys begin."
            )
        if any(found.documents for found in idioms):
            yield _said(
                "Documents are sorted: their tiles of keys begin with the document of the first query."
            )


def _on_hopper(hopper: HopperPlan) -> Iterator[tuple[str, str, str]]:
    order = "from a counter" if hopper.dynamic else "in turn"
    found = {
        "forward": hopper.forward,
        "dq, dk, dv": hopper.fused,
        "dq": hopper.dq,
        "dk and dv": hopper.dkdv,
    }
    for kernel, tile in found.items():
        if tile is not None:
            sizes = f"{tile.BLOCK_M} x {tile.BLOCK_N}"
            least = f", of {hopper.least_keys} keys or more" if tile is hopper.fused else ""
            yield kernel, f"{HOPPER}, Gluon", f"{sizes}, each program takes tiles {order}{least}"


def kernels(plan: AttentionPlan) -> Iterator[Block]:
    """Of each pass: what runs on Hopper, or why nothing of its own does, and on other chips."""
    missing = without_kernels(plan)
    rows: list[tuple[Words, ...]] = []
    for name in plan.spec.passes:
        if name == "decode":
            own = words("portable: keys are split over programs on every chip")
        elif name in missing:
            own = quoting(f"portable. No kernels for Hopper: {missing[name]}.")
        else:
            own = words("kernels of its own, in Gluon, where TMA can load the tensors; portable ones else")
        rows.append((words(name), own, words("portable")))
    yield Table(("pass", HOPPER, "every other chip"), tuple(rows))
    yield _said("Portable kernels are in Triton. Kernels in Gluon are made for sm_90 alone.")


def _said(text: str) -> Prose:
    return Prose(words(text))


def chip_name(chip: int) -> str:
    """A compute capability as people say it."""
    return f"sm_{chip}" if chip else "any other chip"


def _tile(tile: Tile) -> str:
    loads = ", TMA" if tile.TMA else ""
    return f"{tile.BLOCK_M} x {tile.BLOCK_N}, {tile.num_warps} warps, {tile.num_stages} stages{loads}"
