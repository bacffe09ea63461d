"""Tasks of some seeds each, and the worker that tries them: `python -m fuzzing.seeds JOB`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import kgen
from fuzzing.drawing import drawn
from fuzzing.running import LIMIT, Outcome, smaller, tried, written
from kgen.verify.farm.tasks import Messages, Task
from kgen.verify.interpreter import ENVIRONMENT
from kgen.verify.processes import WorkerError, importing_from, messages, serve

OF_A_TASK = 50
"""Seeds per process. A process needs seconds to import torch and triton, and does not release all
its memory.
"""
CODE = ("tests",)
"""Folders that workers import from, in addition to the package."""


@dataclass(frozen=True)
class Seeds:
    """Job of a worker: seeds to try, or one failed outcome whose spec it reduces."""

    seeds: tuple[int, ...]
    failed: Outcome | None = None
    device: str = "cpu"


def tasks(seeds: Sequence[int], beside: int, device: str = "cpu") -> list[Task]:
    """Split the seeds into enough tasks for all workers, with at most `OF_A_TASK` seeds each."""
    size = max(1, min(OF_A_TASK, -(-len(seeds) // beside)))
    parts = [tuple(seeds[first : first + size]) for first in range(0, len(seeds), size)]
    return [
        Task(("seeds", f"{part[0]}-{part[-1]}"), outcomes, Seeds(part, device=device))
        for part in parts
    ]


def smaller_one(failed: Outcome) -> Task:
    """Return the task that reduces the spec of a failed seed."""
    return Task(
        ("smaller", str(failed.seed)), outcomes, Seeds((failed.seed,), failed, failed.device)
    )


def outcomes(job: Seeds, instead: Messages | None = None) -> Iterator[dict[str, Any]]:
    """Yield one row per seed.

    A seed that ends its process is a crash, and another process tries the rest.
    """
    paths = (Path(kgen.__file__).parents[1], Path(__file__).parents[1])
    interpreted = ENVIRONMENT if job.device == "cpu" else {}
    environment = {
        **interpreted,
        "PYTHONPATH": importing_from(*paths, os.environ.get("PYTHONPATH")),
    }
    left = list(job.seeds)
    while left:
        trouble = "ended before its last seed"
        try:
            timeout = LIMIT * (60.0 if job.failed else 4.0)
            for message in (instead or messages)(
                "fuzzing.seeds", replace(job, seeds=tuple(left)), timeout, environment
            ):
                if message.get("seed") in left:
                    left.remove(message["seed"])
                    yield message
        except WorkerError as error:
            trouble = str(error)
        if left:
            seed = left.pop(0)
            crash = Outcome(
                seed, "crash", trouble[:2000], written(drawn(seed)), 0.0, device=job.device
            )
            yield crash.row()


def main(job: Seeds, lines: IO[str]) -> None:
    """Try the seeds of a job, or reduce its spec."""
    for seed in job.seeds:
        outcome = smaller(job.failed)[1] if job.failed else tried(seed, device=job.device)
        print(json.dumps(outcome.row()), file=lines, flush=True)


if __name__ == "__main__":
    serve(main)
