"""Compile an emitted `cuda.py` for one architecture: `python -m kgen.build.compile_cuda JOB`.

JOB is a pickled `BuildJob`. The worker writes cubins to the job's folder, and prints one JSON line
for each.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import IO, Any

from kgen.build.worker_job import BuildJob
from kgen.sizes import SHARED_LIMITS
from kgen.verify.families import family_of
from kgen.verify.processes import serve
from kgen.verify.resources import usage_of
from kgen.verify.toolchain import import_file


def build_all(build: BuildJob, say: Callable[[Mapping[str, Any]], None]) -> None:
    """Compile the kernels of the family's calls, for each row of the launch tables that the
    architecture can run.
    """
    job = build.job
    module: Any = import_file(job.emitted.path, f"kgen_emitted_{job.problem.name}")
    seen: set[str] = set()

    def launch(
        device: Any,
        name: str,
        grid: Any,
        block: int,
        arguments: Any,
        shared: int = 0,
        cluster: int = 1,
    ) -> None:
        if name in seen:
            return
        seen.add(name)
        try:
            say(_row(build, module._compiled(name, job.arch), name, shared) | {"error": None})
        except Exception as error:  # report the other kernels, too
            traceback.print_exc()
            say({"error": f"{name}: {type(error).__name__}: {error}"[:2000]})

    # Without a seed, names of internal symbols contain a number of the process: equal inputs must
    # give equal bytes.
    module.ProgramOptions = partial(module.ProgramOptions, frandom_seed="0")
    # Launchers choose kernels by capability (sm_90). The compiler may get a more specific name
    # (sm_90a).
    module._arch = lambda device: f"sm_{job.capability}"
    module._launch = launch
    module._resident = lambda *args: 1  # as if every kernel fitted
    module._shared_limit = lambda device: SHARED_LIMITS[job.capability]
    function = getattr(module, job.problem.name)
    calls = [call for _, call in family_of(job.problem).compile_calls(job.problem)]
    for call in calls:
        call(function)
    # Calls do not cover all widths. A row decides which kernels run, so launch each row once.
    for chosen in _plans(module, job.capability) if hasattr(module, "_plan") else ():
        module._plan = chosen
        calls[0](function)


def _plans(module: Any, capability: int) -> Iterator[Callable[..., Any]]:
    """Yield replacements for a launcher's `_plan`, one per row number of its tables.

    A replacement returns that row if the architecture can run it, and otherwise the launcher's own
    choice.
    """
    plan, tables = module._plan, module._SHAPES

    def row(number: int, kernel: str, device: Any, width: int, vector: int) -> Any:
        for shape in tables[kernel][number : number + 1]:
            if shape.shared <= SHARED_LIMITS[capability] and (
                shape.cluster == 1 or capability >= 90
            ):
                return module._name(kernel, shape), shape, 1
        return plan(kernel, device, width, vector)

    return (partial(row, number) for number in range(max(map(len, tables.values()))))


def _row(build: BuildJob, code: Any, name: str, shared: int) -> dict[str, Any]:
    """Write the cubin of a kernel to the job's folder, and return its entry in the manifest."""
    registers, spills, static = usage_of(code, name)
    return {
        "kernel": name,
        "arch": build.job.arch,
        "capability": build.job.capability,
        **build.keep(name.rpartition("::")[2].partition("<")[0], bytes(code.code)),
        "symbol": code.symbol_mapping[name].decode(),
        "shared": static + shared,
        "registers": registers,
        "spills": spills,
    }


def main(build: BuildJob, lines: IO[str]) -> None:
    """Run a job."""
    build_all(build, lambda row: print(json.dumps(row), file=lines, flush=True))


if __name__ == "__main__":
    serve(main)
