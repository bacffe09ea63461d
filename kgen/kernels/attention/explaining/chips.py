"""Sections on the kernels of each chip, and on their tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kgen.kernels.attention.explaining.explained import Explained
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.pages.model import Block, Prose, Table, Words, words


def tiles(explained: Sequence[Explained]) -> Iterator[Block]:
    """Yield the table of tiles from which the launcher chooses."""
    yield _said(
        "queries x keys, warps, pipeline stages; TMA if the strides of the tensors allow it"
    )
    cells = tuple(tuple(map(words, row)) for of in explained for row in of.tiles)
    yield Table(("kernel", "chip", "tile"), cells, plain_head=False)
    for of in explained:
        yield from map(_said, of.remarks)


def kernels(plan: AttentionPlan, explained: Sequence[Explained]) -> Iterator[Block]:
    """Yield the kernels of each pass: on each chip with special kernels, or the reason against
    them, and elsewhere.
    """
    chips = [of for of in explained if of.chip is not None]
    anywhere = {
        name: found for of in explained if of.chip is None for name, found in of.passes.items()
    }
    rows: list[tuple[Words, ...]] = []
    for name in plan.spec.passes:
        own = [of.passes.get(name) or anywhere.get(name) or words("portable") for of in chips]
        rows.append((words(name), *own, words("portable")))
    yield Table(("pass", *(str(of.chip) for of in chips), "every other chip"), tuple(rows))
    yield _said(" ".join(of.language for of in explained if of.language))


def _said(text: str) -> Prose:
    return Prose(words(text))


def chip_name(chip: int) -> str:
    """Return the name of a compute capability: `sm_90` for 90, and "any other chip" for 0."""
    return f"sm_{chip}" if chip else "any other chip"
