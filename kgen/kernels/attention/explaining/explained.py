"""The contribution of a schedule to the page of `kgen explain`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kgen.kernels.attention.plan.model import AttentionPlan, TileLoop
from kgen.kernels.attention.schedules import SCHEDULES
from kgen.pages.model import Block, Words
from kgen.spec.load import Loaded


@dataclass(frozen=True)
class Explained:
    """The facts and texts on a schedule's kernels for one spec."""

    chip: str | None = None
    """The chip of the kernels. None for every chip."""
    passes: Mapping[str, Words] = field(default_factory=dict)
    """The kernels of each pass on that chip, or the condition that rules them out."""
    language: str = ""
    """A sentence on the language of the kernels."""
    tiles: Sequence[tuple[str, str, str]] = ()
    """Kernels, chips, and tiles in words."""
    remarks: Sequence[str] = ()
    """Sentences on these tiles."""
    sections: Mapping[str, Iterable[Block]] = field(default_factory=dict)
    """Further sections, by title."""
    loops: Mapping[str, TileLoop] = field(default_factory=dict)
    """Loops over tiles, by kernel."""
    tables: Mapping[str, Mapping[int, Iterable[Any]]] = field(default_factory=dict)
    """Tiles by kernel and chip. Chip 0 is every chip without its own row."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The schedule's own fields of `--format json`."""


def explained_by(loaded: Loaded, plan: AttentionPlan) -> list[Explained]:
    """Return the contribution of each schedule. The schedule that most calls use is first."""
    of = [schedule.explained for schedule in reversed(SCHEDULES)]
    return [found(loaded, plan) for found in of if found is not None]
