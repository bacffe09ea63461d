"""Programs in several processes, one for each rank, with gloo and Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kgen.render.adapters import Adapter

ROOT = Path(__file__).parents[3]


def launched(
    program: str, folder: Path, jobs: Sequence[dict[str, Any]], seconds: float
) -> list[list[Any]]:
    """Return the lines that each rank wrote about its calls.

    `program` runs as `python PROGRAM RANK RANKS FOLDER`. It reads FOLDER/jobs.json and writes a
    line of JSON for each job into FOLDER/rankN.jsonl.
    """
    (folder / "jobs.json").write_text(json.dumps(list(jobs)))
    world = max(job["ranks"] for job in jobs)
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, program]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(folder)], env=environment, stderr=subprocess.PIPE
        )
        for rank in range(world)
    ]
    end = time.monotonic() + seconds
    said = []
    try:
        for process in processes:
            said.append(process.communicate(timeout=end - time.monotonic())[1].decode()[-3000:])
    finally:
        for process in processes:
            process.kill()
    written = [folder / f"rank{rank}.jsonl" for rank in range(world)]
    found = [[json.loads(line) for line in path.read_text().splitlines()] for path in written]
    wanted = sum(1 for job in jobs if job["ranks"] >= 1)
    assert len(found[0]) == wanted, "\n".join(said)
    return found


def written(folder: Path, made: Adapter) -> None:
    """Write a package."""
    for place, files in made.folders.items():
        (folder / place).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / place / name).write_text(text)
