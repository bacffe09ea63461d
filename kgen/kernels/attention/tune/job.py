"""What one tuning worker does; nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kgen.kernels.attention.bench.shape import Shape
from kgen.kernels.attention.plan.tuned import Tile


@dataclass(frozen=True)
class TuneJob:
    """What one worker does. `trials` are (kernel, tile); `capability` compiles for it without a GPU, None times."""

    problem: Any
    path: Path
    shape: Shape
    trials: tuple[tuple[str, Tile], ...]
    capability: int | None
