"""Options of `kgen bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kgen.verify.farm.sharding import WHOLE, Shard

NEUTRAL = "neutral"


@dataclass(frozen=True)
class BenchOptions:
    """Peers, sizes, device and output folder of `kgen bench`."""

    against: Sequence[str] | None = None
    """Names of peers; None for the default peers of the family."""
    shape: str | None = None
    """Sizes as text, for example `2x16x8192`. Several, separated by commas, are measured in turn.
    `neutral` stands for all shapes of other projects' benchmarks, and `neutral:2x16x8192` for one
    of them. None for the family's default."""
    output: Path | None = Path("benchmarks")
    """The folder of reports; None to write none."""
    device: str = "cuda"
    """`cuda`, `auto`, or `cpu`. `cpu` is a dry run in Triton's interpreter; its times mean
    nothing.
    """
    timeout: float = 900.0
    """Seconds that a worker may take until its next row."""
    first_call: bool = False
    """True to time the first call in a fresh process. Only attention supports it."""
    shard: Shard = WHOLE
    """The part of the specs to measure."""

    @property
    def shapes(self) -> list[str]:
        """The text of each shape; one empty text for the default."""
        return [text.strip() for text in self.shape.split(",")] if self.shape else [""]

    @property
    def kind(self) -> str:
        """The suffix of the family's report file: `neutral`, `shapes`, `first-call`, or empty."""
        if any(is_neutral(text) for text in self.shapes):
            return NEUTRAL
        return "shapes" if len(self.shapes) > 1 else "first-call" if self.first_call else ""


def is_neutral(text: str) -> bool:
    """True if the text of a shape names shapes of other projects' benchmarks."""
    return text.partition(":")[0] == NEUTRAL
