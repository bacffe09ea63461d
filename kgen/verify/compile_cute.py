"""Compile a `cute_<arch>.py` for its architecture: `python -m kgen.verify.compile_cute JOB`.

The function `compile_for` of the emitted file compiles it; nothing is launched. JOB is a pickled
`CompileJob`. Standard output carries a JSON line for each kernel.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping
from typing import IO, Any

from kgen.verify.compiling import CompileJob
from kgen.verify.processes import serve
from kgen.verify.resources import usages
from kgen.verify.toolchain import import_file

TENSOR_CORES = {"sm_90a": "wgmma.mma_async", "sm_100a": "tcgen05.mma"}
"""The tensor core instruction that the code for each architecture must contain."""
INDICES = "_chunk_indices_kernel"
"""The kernel that finds the chunks of packed sequences. All of its shared memory is static."""


def compile_all(job: CompileJob, say: Callable[[Mapping[str, Any]], None]) -> None:
    """Compile the main kernel of a file, and the kernel for chunk indices if the file has one."""
    place: dict[str, Any] = {"variant": "", "error": None}
    try:
        module: Any = import_file(job.emitted.path, f"kgen_emitted_{job.problem.name}")
        compiled = module.compile_for(job.arch)
        wrong = None
        if TENSOR_CORES[job.arch] not in compiled.__ptx__:
            wrong = f"{TENSOR_CORES[job.arch]} is not among its instructions"
        for name, (registers, spills, static) in usages(compiled.__cubin__).items():
            main = INDICES not in name
            found = {
                "kernel": "_kernel" if main else INDICES,
                "registers": registers,
                "spills": spills,
            }
            found["shared"] = int(module.Shared.size_in_bytes()) if main else static
            say(place | found | {"error": wrong if main else None})
    except Exception as error:
        traceback.print_exc()
        say(place | {"kernel": "_kernel", "error": f"{type(error).__name__}: {error}"[:2000]})


def main(job: CompileJob, lines: IO[str]) -> None:
    """Run a job."""
    compile_all(job, lambda row: print(json.dumps(row), file=lines, flush=True))


if __name__ == "__main__":
    serve(main)
