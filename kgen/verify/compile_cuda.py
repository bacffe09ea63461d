"""Compile the kernels of a `cuda.cu` for one architecture:
`python -m kgen.verify.compile_cuda JOB`.

The emitted launcher runs on small CPU tensors. Its `_launch` is replaced by a function that
compiles the kernel instead. NVRTC needs no GPU. JOB is a pickled `CompileJob`. Standard output
carries a JSON line for each kernel.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping
from typing import IO, Any

from kgen.sizes import SHARED_LIMITS
from kgen.verify.compiling import CompileJob
from kgen.verify.families import family_of
from kgen.verify.processes import serve
from kgen.verify.resources import usage_of
from kgen.verify.toolchain import import_file


def compile_all(job: CompileJob, say: Callable[[Mapping[str, Any]], None]) -> None:
    """Make the family's calls of the emitted function, and compile the kernels that they launch."""
    module: Any = import_file(job.emitted.path, f"kgen_emitted_{job.problem.name}")
    seen: set[str] = set()
    variant = ""

    def compile_only(device: Any, name: str, *args: Any, shared: int = 0, **kwargs: Any) -> None:
        if name in seen:
            return
        seen.add(name)
        row: dict[str, Any] = {
            "kernel": name.rpartition("::")[2],
            "variant": variant,
            "error": None,
        }
        try:
            registers, spills, static = usage_of(module._compiled(name, job.arch), name)
            row |= {"registers": registers, "spills": spills, "shared": static + shared}
        except Exception as error:  # report the other kernels, too
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"[:2000]
        say(row)

    # The launcher chooses by compute capability. The compilation may be for a more exact
    # architecture (sm_90a).
    module._arch = lambda device: f"sm_{job.capability}"
    module._launch = compile_only
    module._resident = lambda *args: 1  # every kernel fits
    module._shared_limit = lambda device: SHARED_LIMITS[job.capability]
    for variant, call in family_of(job.problem).compile_calls(job.problem):  # noqa: B007 (read by `compile_only`)
        call(getattr(module, job.problem.name))
    # The table of shapes also has kernels for widths that no call has.
    for kernel, shapes in getattr(module, "_SHAPES", {}).items():
        for shape in shapes:
            if shape.cluster == 1 or job.capability >= 90:
                variant = f"width {shape.width}"
                compile_only(None, module._name(kernel, shape))


def main(job: CompileJob, lines: IO[str]) -> None:
    """Run a job."""
    compile_all(job, lambda row: print(json.dumps(row), file=lines, flush=True))


if __name__ == "__main__":
    serve(main)
