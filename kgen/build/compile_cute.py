"""Compile an emitted `cute_<arch>.py` for its architecture:
`python -m kgen.build.compile_cute JOB`.

JOB is a pickled `BuildJob`. The worker writes object files to the job's folder, and prints one JSON
line for each. An object file has the kernels for one set of constants, and host code for this
machine's processor. The host code encodes TMA descriptors and launches the kernels.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import platform
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import IO, Any

from kgen.build.runtime.cute import words
from kgen.build.worker_job import BuildJob
from kgen.verify.compile_cute import INDICES
from kgen.verify.processes import serve
from kgen.verify.resources import usages
from kgen.verify.toolchain import import_file


def build_all(build: BuildJob, say: Callable[[Mapping[str, Any]], None]) -> None:
    """Compile the kernels for each set of constants that the launcher may request, with the job's
    sizes.
    """
    module: Any = import_file(build.job.emitted.path, f"kgen_emitted_{build.job.problem.name}")
    # Without a CUDA driver, the DSL does not load the libraries that its host code is linked with.
    for library in module.cute.runtime.find_runtime_libraries(enable_tvm_ffi=False):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    for constants in _constants(module, build):
        try:
            say(_row(build, module, constants) | {"error": None})
        except Exception as error:  # report the other kernels, too
            traceback.print_exc()
            given = ", ".join(f"{name} {word}" for name, word in words(constants).items())
            say({"error": f"_kernel, {given}: {type(error).__name__}: {error}"[:2000]})


def _constants(module: Any, build: BuildJob) -> Iterator[dict[str, Any]]:
    """Yield the arguments of the emitted file's `_compiled`: fixed by the spec, or one of the job's
    sizes.
    """
    problem, sizes = build.job.problem, build.sizes
    names = [
        n for n in inspect.signature(module._compiled.__wrapped__).parameters if n != "options"
    ]
    # Packed sequences: the caller may pass the chunks, and lengths are int32 or int64.
    packed = "given" in names
    choices: dict[str, Sequence[Any]] = {
        "index": (module.Int32, module.Int64) if packed else (module.Int32,),
        "given": (False, True),
        "H": [problem.heads] if problem.heads else sizes["heads"],
        "GROUP": [problem.group] if problem.group else sizes["gqa"],
    }
    for values in product(*(choices[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def _row(build: BuildJob, module: Any, constants: Mapping[str, Any]) -> dict[str, Any]:
    """Write the object file of a set of constants to the job's folder, and return its entry in the
    manifest.
    """
    name, arch = build.job.problem.name, build.job.arch
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {arch} --keep-cubin --dump-dir {folder}"
        compiled = module._compiled(*constants.values(), options)
        compiled.export_to_c(folder, name, name)
        code = (Path(folder) / f"{name}.o").read_bytes()
        used = usages(compiled.__cubin__)
    ((registers, spills, _),) = (found for kernel, found in used.items() if INDICES not in kernel)
    return {
        "kernel": "_kernel",
        "constants": words(constants),
        "host": platform.machine(),
        "arch": arch,
        "capability": build.job.capability,
        **build.keep(name, code, ".o"),
        "symbol": name,
        "shared": int(module.Shared.size_in_bytes()),
        "registers": registers,
        "spills": spills,
    }


def main(build: BuildJob, lines: IO[str]) -> None:
    """Run a job."""
    build_all(build, lambda row: print(json.dumps(row), file=lines, flush=True))


if __name__ == "__main__":
    serve(main)
