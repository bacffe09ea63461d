"""What the worker that builds is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kgen.verify.compiling import CompileJob


@dataclass(frozen=True)
class BuildJob:
    """What one worker compiles, and where to. `problems` are calls of the spec, as of several numbers of heads."""

    job: CompileJob
    problems: tuple[Any, ...]
    folder: Path
