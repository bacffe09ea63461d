"""Time the emitted files of one spec against their peers: `python -m kgen.bench.worker JOB`.

JOB is a pickled `BenchJob`. Standard output carries JSON lines: facts about the device, and a row
per pass and peer.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
from itertools import chain
from typing import IO

from kgen.bench.timing import BenchJob, driver, preparing
from kgen.family import family
from kgen.verify import interpreter
from kgen.verify.processes import serve
from kgen.verify.toolchain import describe, import_file, versions

BESIDE = (
    "nvidia-cutlass-dsl",
    "cuda-core",
    "fla-core",
    "flash-attn-3",
    "flash-attn-4",
    "liger-kernel",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-frontend",
    "quack-kernels",
)
"""Packages of targets and peers. The report has the versions of those that are installed."""


def _beside() -> dict[str, str]:
    found = {}
    for package in BESIDE:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def main(job: BenchJob, lines: IO[str]) -> None:
    """Run a job."""
    if job.device == "cpu":
        interpreter.mend()
    name, own = job.problem.name, family(job.problem.kernel)
    with preparing(job):
        functions = {
            f"kgen-{stem}" if number else "kgen": getattr(
                import_file(path, f"kgen_emitted_{name}_{stem}"), name
            )
            for number, (stem, path) in enumerate(job.files.items())
        }
        runtimes = [own.targets[stem.partition("_")[0]].runtime for stem in job.files]
        tools = {k: v for runtime in runtimes for k, v in versions(runtime.tools).items()}
        facts = {
            "facts": {
                **describe(job.device),
                "driver": driver(job.device),
                "versions": tools | _beside(),
            }
        }
    assert own.bench is not None, "it made the job"
    for line in chain([facts], own.bench.race(job, functions)):
        print(json.dumps(line), file=lines, flush=True)


if __name__ == "__main__":
    serve(main)
