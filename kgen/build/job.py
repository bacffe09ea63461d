"""What the worker that builds is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kgen.verify.compiling import CompileJob


@dataclass(frozen=True)
class BuildJob:
    """What one worker compiles, and where to. `sizes` are those of what the spec leaves open, as of `compile_calls`."""

    job: CompileJob
    sizes: Mapping[str, Sequence[int]]
    folder: Path
