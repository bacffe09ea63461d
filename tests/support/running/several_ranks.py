"""Programs in several processes, one for each rank, with gloo and Triton's interpreter.

`python several_ranks.py PROGRAM RANKS FOLDER` imports a program once, and forks a process for each
rank. Imports take longer than the kernels of a small call.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kgen.render.adapters import Adapter

ROOT = Path(__file__).parents[3]


def launched(
    program: str, folder: Path, jobs: Sequence[dict[str, Any]], seconds: float
) -> list[list[Any]]:
    """Return the lines that each rank wrote about its calls.

    Each rank calls `main()` of the program with the arguments RANK RANKS FOLDER. It reads
    FOLDER/jobs.json and writes a line of JSON for each job into FOLDER/rankN.jsonl.
    """
    (folder / "jobs.json").write_text(json.dumps(list(jobs)))
    world = max(job["ranks"] for job in jobs)
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    process = subprocess.Popen(
        [sys.executable, __file__, program, str(world), str(folder)],
        env=environment,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        said = process.communicate(timeout=seconds)[1].decode()[-9000:]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    lines = [folder / f"rank{rank}.jsonl" for rank in range(world)]
    assert all(path.exists() for path in lines), said
    found = [[json.loads(line) for line in path.read_text().splitlines()] for path in lines]
    wanted = sum(1 for job in jobs if job["ranks"] >= 1)
    assert len(found[0]) == wanted, said
    return found


def written(folder: Path, made: Adapter) -> None:
    """Write a package."""
    for place, files in made.folders.items():
        (folder / place).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / place / name).write_text(text)


def _forked(program: str, world: int, folder: str) -> None:
    """Run `main()` of a program in a process for each rank, and wait for all."""
    spec = importlib.util.spec_from_file_location("program", program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(program).parent))
    spec.loader.exec_module(module)
    children = [_rank(module, program, str(rank), str(world), folder) for rank in range(world)]
    for child in children:
        os.waitpid(child, 0)


def _rank(module: Any, *arguments: str) -> int:
    """Fork one rank, and return the id of its process."""
    if child := os.fork():
        return child
    sys.argv[:] = arguments
    try:
        module.main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    _forked(sys.argv[1], int(sys.argv[2]), sys.argv[3])
