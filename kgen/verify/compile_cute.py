"""Compiles a `cute_<arch>.py` for its architecture: `python -m kgen.verify.compile_cute JOB`.

The emitted file says how (`compile_for`); what comes out is looked at, nothing is launched. JOB is a pickled
`CompileJob`. Standard output carries a JSON line for the kernel.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping
from typing import IO, Any

from kgen.verify.compiling import CompileJob
from kgen.verify.processes import serve
from kgen.verify.resources import resources
from kgen.verify.toolchain import import_file

TENSOR_CORES = {"sm_90a": "wgmma.mma_async", "sm_100a": "tcgen05.mma"}
"""The instruction without which a kernel is not what it claims to be."""


def compile_all(job: CompileJob, say: Callable[[Mapping[str, Any]], None]) -> None:
    """Compile the one kernel of a file."""
    row: dict[str, Any] = {"kernel": "_kernel", "variant": "", "error": None}
    try:
        module: Any = import_file(job.emitted.path, f"kgen_emitted_{job.problem.name}")
        compiled = module.compile_for(job.arch)
        registers, spills = resources(compiled.__cubin__)
        row |= {"registers": registers, "spills": spills, "shared": int(module.Shared.size_in_bytes())}
        if TENSOR_CORES[job.arch] not in compiled.__ptx__:
            row["error"] = f"{TENSOR_CORES[job.arch]} is not among its instructions"
    except Exception as error:
        traceback.print_exc()
        row["error"] = f"{type(error).__name__}: {error}"[:2000]
    say(row)


def main(job: CompileJob, lines: IO[str]) -> None:
    """Run a job."""
    compile_all(job, lambda row: print(json.dumps(row), file=lines, flush=True))


if __name__ == "__main__":
    serve(main)
