"""Options of `kgen bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kgen.verify.farm.sharding import WHOLE, Shard


@dataclass(frozen=True)
class BenchOptions:
    """The contenders of a race, the device, and the folder of its reports."""

    against: Sequence[str] | None = None
    """Names of peers; None for the default peers of the family."""
    shape: str | None = None
    """Text that the family reads, as `2x16x8192`; several with commas are measured one by one. None for the default."""
    output: Path | None = Path("benchmarks")
    """The folder of reports; None to write none."""
    device: str = "cuda"
    """`auto`, `cuda` or `cpu`: a dry run in Triton's interpreter, whose times mean nothing."""
    timeout: float = 900.0
    """Seconds that a worker may take until its next row."""
    first_call: bool = False
    """True to time the first call in a fresh process, where the family can."""
    shard: Shard = WHOLE
    """The part of the specs that races."""

    @property
    def shapes(self) -> list[str]:
        """The text of each shape, empty for the default."""
        return [text.strip() for text in self.shape.split(",")] if self.shape else [""]

    @property
    def kind(self) -> str:
        """The suffix of the file of a family, where it has one."""
        return "shapes" if len(self.shapes) > 1 else "first-call" if self.first_call else ""
