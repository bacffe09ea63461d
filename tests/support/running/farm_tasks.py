"""Tasks for tests of a cluster, which its nodes import."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Waiting:
    """A task that says in a folder that it has begun, and goes on when `go` is there."""

    name: str
    folder: Path


def waiting(job: Waiting, instead: Callable[..., Any] | None = None) -> Iterator[dict[str, Any]]:
    """Two rows."""
    yield {"name": job.name, "row": 1}
    begun = job.folder / f"{job.name}-{os.getpid()}"
    begun.touch()
    until((job.folder / "go").exists)
    yield {"name": job.name, "row": 2}


def read(job: Path, instead: Callable[..., Any] | None = None) -> Iterator[dict[str, Any]]:
    """What a file says that went along, and what is beside it."""
    yield {"text": job.read_text(), "path": str(job), "beside": sorted(p.name for p in job.parent.iterdir())}


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for something."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)
