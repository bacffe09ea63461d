"""The job of a tuning worker. It does not need torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kgen.kernels.attention.bench.shape import Shape
from kgen.kernels.attention.plan.tuned import Tile


@dataclass(frozen=True)
class TuneJob:
    """The job of one worker. `trials` are (kernel, tile).

    With a `capability` the worker compiles for it without a GPU. With None it times.
    """

    problem: Any
    path: Path
    shape: Shape
    trials: tuple[tuple[str, Tile], ...]
    capability: int | None
