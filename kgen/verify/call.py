"""One call of an emitted file, with gradients where it has them: `python -m kgen.verify.call JOB`.

JOB is a pickled `kgen.verify.worker.Job`. Standard output carries one JSON line: the names of the
results.
"""

from __future__ import annotations

import json
from typing import IO, Any

import torch

from kgen.family import chips
from kgen.verify import interpreter
from kgen.verify.families import Subject, family_of
from kgen.verify.processes import serve
from kgen.verify.toolchain import import_file
from kgen.verify.worker import Job


def main(job: Job, lines: IO[str]) -> None:
    """Run a job."""
    if job.device == "cpu":
        interpreter.mend()
    problem, file = job.problem, job.emitted
    module = import_file(file.path, f"kgen_emitted_{problem.name}_{file.stem}")
    subject = Subject(problem, file.target, file.path, module, job.device)
    ((_, name),) = job.cases
    if name == "racecheck":
        take_portable_kernels(module)
    outputs = family_of(problem).example(subject, name).run(subject.function)
    if job.device == "cuda":
        torch.cuda.synchronize()
    print(json.dumps({"outputs": list(outputs)}), file=lines, flush=True)


def take_portable_kernels(module: Any) -> None:
    """Make calls of an emitted file use its portable kernels.

    racecheck reports false races for data that warps exchange through mbarriers.
    """
    for chip in chips():
        if hasattr(module, chip.choice):
            setattr(module, chip.choice, lambda *tensors: False)


if __name__ == "__main__":
    serve(main)
