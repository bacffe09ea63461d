"""Compiles the kernels of one emitted file for one architecture: `python -m kgen.verify.compile_worker JOB`.

JOB is a pickled `CompileJob`. Standard output carries a JSON line for each distinct binary.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kgen.verify.compiling import CompileJob
from kgen.verify.inputs import Case, Inputs, draw
from kgen.verify.integration import call, differentiable
from kgen.verify.problem import Problem
from kgen.verify.toolchain import import_file


class OfflineDriver:
    """Says that a device of some capability is the current one. It cannot launch anything."""

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


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory of each thread of the (one) kernel in a cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool) if tool.exists() else "cuobjdump", "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    if match is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {text[:200]}")
    return int(match[1]), int(match[2]) + int(match[3])


def variants(problem: Problem) -> Iterator[tuple[str, Inputs]]:
    """The calls that lead to different specialisations: everything divisible by 16, and nothing."""
    step = math.lcm(problem.q_multiple, problem.kv_multiple)
    length = -(-256 // step) * step
    group = 2 if problem.gqa == "any" else int(problem.gqa)
    even = Case("aligned", length, length, batch=2, heads_kv=2, group=group)
    yield "aligned", draw(problem, even, "cpu")
    odd = length - 1 if step == 1 else length
    yield (
        "strided",
        draw(problem, Case("strided", odd, odd, 2, 2, group, layout="guarded", dout="strided"), "cpu"),
    )


def compile_all(job: CompileJob, say: Callable[[Mapping[str, Any]], None]) -> None:
    """Call the emitted function forward and backward on every variant, compiling what it launches."""
    driver.set_active(OfflineDriver(job.capability))
    module: Any = import_file(job.path, f"kgen_emitted_{job.problem.name}")
    module._arch = lambda device: job.capability
    launch = JITFunction.run
    seen: set[tuple[str, str]] = set()
    variant = ""

    def compile_only(function: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        row: dict[str, Any] = {"kernel": function.fn.__name__, "variant": variant, "error": None}
        try:
            kernel = launch(function, *args, grid=grid, warmup=True, **kwargs)
            if (row["kernel"], kernel.hash) in seen:
                return
            seen.add((row["kernel"], kernel.hash))
            registers, spills = resources(kernel.asm["cubin"])
            row |= {"registers": registers, "spills": spills, "shared": int(kernel.metadata.shared)}
        except Exception as error:  # one kernel that does not compile must not hide the others
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"[:2000]
            if (row["kernel"], row["error"]) in seen:
                return
            seen.add((row["kernel"], row["error"]))
        say(row)

    JITFunction.run = compile_only
    try:
        for name, inputs in variants(job.problem):
            variant = name
            _call(job.problem, getattr(module, job.problem.name), inputs)
    finally:
        JITFunction.run = launch


def _call(problem: Problem, function: Any, inputs: Inputs) -> None:
    """Every path of the launcher: without and with gradients, with the log-sum-exp too."""
    call(function, inputs)
    call(function, inputs, return_lse=True)
    if "backward" in problem.passes:
        wanted = differentiable(problem, inputs)
        torch.autograd.grad(call(function, inputs), list(wanted.values()), inputs.dout)


def main(job: CompileJob, lines: IO[str]) -> None:
    """Run a job."""
    compile_all(job, lambda row: print(json.dumps(row), file=lines, flush=True))


if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        the_job = pickle.load(file)
    # Keep standard output for results: what anything else prints there goes to standard error.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(the_job, results)
