"""Compile the kernels of a `triton.py` for one architecture:
`python -m kgen.verify.compile_triton JOB`.

The emitted launcher runs on small CPU tensors. `JITFunction.run` is replaced by a function that
compiles the kernel, specialized as Triton would specialize it. JOB is a pickled `CompileJob`.
Standard output carries a JSON line for each binary.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kgen.verify.compiling import CompileJob
from kgen.verify.families import NO_SIZES, family_of
from kgen.verify.processes import serve
from kgen.verify.resources import resources
from kgen.verify.toolchain import import_file


class OfflineDriver:
    """Triton driver that reports a device of some compute capability. It cannot launch kernels."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def is_active(self) -> bool:
        return True


def compile_all(job: CompileJob, say: Callable[[Mapping[str, Any]], None]) -> None:
    """Make the family's calls of the emitted function, and compile the kernels that they launch."""
    seen: set[tuple[str, str]] = set()

    def take(variant: str, launch: Launch) -> None:
        row: dict[str, Any] = {
            "kernel": launch.function.fn.__name__,
            "variant": variant,
            "error": None,
        }
        try:
            kernel = launch.compiled()
            if (row["kernel"], kernel.hash) in seen:
                return
            seen.add((row["kernel"], kernel.hash))
            registers, spills = resources(kernel.asm["cubin"])
            row |= {"registers": registers, "spills": spills, "shared": int(kernel.metadata.shared)}
        except Exception as error:  # report the other kernels, too
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"[:2000]
            if (row["kernel"], row["error"]) in seen:
                return
            seen.add((row["kernel"], row["error"]))
        say(row)

    each_launch(job, take)


@dataclass(frozen=True)
class Launch:
    """A kernel that a call would launch, its arguments, and its compilation with Triton's
    specialization.
    """

    function: Any
    args: Sequence[Any]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    compiled: Callable[[], Any]


MULTIPROCESSORS = 4096
"""More multiprocessors than any GPU has."""


def each_launch(
    job: CompileJob,
    take: Callable[[str, Launch], None],
    sizes: Mapping[str, Sequence[int]] = NO_SIZES,
) -> None:
    """Call `take` with each launch of the family's calls. No kernel runs."""
    driver.set_active(OfflineDriver(job.capability))
    module: Any = import_file(job.emitted.path, f"kgen_emitted_{job.problem.name}")
    module._arch = lambda device: job.capability
    # Decoding splits keys while multiprocessors are free. With this many, it splits as far as the
    # keys allow.
    module._multiprocessors = lambda device: MULTIPROCESSORS
    run, variant = JITFunction.run, ""

    def taken(function: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        constants = {name: value for name, value in kwargs.items() if name in function.arg_names}
        options = {name: value for name, value in kwargs.items() if name not in function.arg_names}

        def compiled() -> Any:
            return run(function, *args, grid=grid, warmup=True, **kwargs)

        take(variant, Launch(function, args, constants, options, compiled))

    JITFunction.run = taken
    try:
        for name, call in family_of(job.problem).compile_calls(job.problem, sizes):
            variant = name
            call(getattr(module, job.problem.name))
    finally:
        JITFunction.run = run


def main(job: CompileJob, lines: IO[str]) -> None:
    """Run a job."""
    compile_all(job, lambda row: print(json.dumps(row), file=lines, flush=True))


if __name__ == "__main__":
    serve(main)
