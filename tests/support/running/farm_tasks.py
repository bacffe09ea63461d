"""Tasks for tests of a cluster. Its nodes import this module."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Waiting:
    """Job of a task that creates a file in `folder` when it starts, and waits for the file `go`."""

    name: str
    folder: Path


def waiting(job: Waiting, instead: Callable[..., Any] | None = None) -> Iterator[dict[str, Any]]:
    """Yield one row, wait for `go`, and yield a second row."""
    yield {"name": job.name, "row": 1}
    begun = job.folder / f"{job.name}-{os.getpid()}"
    begun.touch()
    until((job.folder / "go").exists)
    yield {"name": job.name, "row": 2}


def read(job: Path, instead: Callable[..., Any] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the content of a file that travelled with the task, and the names in its folder."""
    yield {
        "text": job.read_text(),
        "path": str(job),
        "beside": sorted(p.name for p in job.parent.iterdir()),
    }


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until `true()` holds, at most `seconds`."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)
