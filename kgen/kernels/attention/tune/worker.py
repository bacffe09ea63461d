"""Compile or time the kernels of one emitted file, tile by tile:
`python -m kgen.kernels.attention.tune.worker JOB`.

JOB is a pickled `TuneJob`. Standard output carries a JSON line before and after each trial, which
identifies the trial that killed a worker.
"""

from __future__ import annotations

import json
import statistics
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import IO, Any

import torch
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kgen.bench.timing import distance
from kgen.kernels.attention.bench.peers import prepare
from kgen.kernels.attention.bench.workload import draw_workload
from kgen.kernels.attention.plan.tuned import Tile
from kgen.kernels.attention.tune.job import TuneJob
from kgen.verify.call import take_portable_kernels
from kgen.verify.compile_triton import OfflineDriver
from kgen.verify.processes import serve
from kgen.verify.resources import resources
from kgen.verify.toolchain import import_file

KERNELS = {
    "forward": ("_forward_kernel", "_FORWARD_TILES"),
    "dq": ("_dq_kernel", "_DQ_TILES"),
    "dkdv": ("_dkdv_kernel", "_DKDV_TILES"),
}
ROUNDS = 6
AGREE = 2e-2
"""Largest relative Frobenius distance between the results of a tile and of the first tile."""


class _Skipped:
    """Replaces a kernel with one that does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class _Stopwatch:
    """Replaces a kernel with one that records events around each launch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.events: list[tuple[Any, Any]] = []
        # Zeroing it flushes L2, and takes longer than the CPU needs for a launch.
        self.flush = torch.empty(2**29, dtype=torch.uint8, device="cuda")

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flush.zero_()
            start.record()
            self.kernel[grid](*args, **kwargs)
            end.record()
            self.events.append((start, end))

        return launch

    def median(self) -> float:
        """Return the median milliseconds of the launches."""
        torch.cuda.synchronize()
        return float(statistics.median(start.elapsed_time(end) for start, end in self.events))


class _Compiler:
    """Replaces a kernel with one that compiles instead of launching."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.found: dict[str, Any] = {}

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            made = JITFunction.run(self.kernel, *args, grid=grid, warmup=True, **kwargs)
            registers, spills = resources(made.asm["cubin"])
            self.found = {
                "registers": registers,
                "spills": spills,
                "shared": int(made.metadata.shared),
            }

        return launch


class Bench:
    """One emitted module with its inputs. One of its kernels runs at a time."""

    def __init__(self, job: TuneJob, device: str) -> None:
        module: Any = import_file(job.path, f"kgen_emitted_{job.problem.name}")
        self.chip = chip = job.capability or module._arch(torch.device(device))
        module._arch = lambda device: chip
        take_portable_kernels(module)  # only the portable kernels have tile tables
        self.module = module
        shape = job.shape
        self.load = draw_workload(job.problem, shape.batch, shape.heads, shape.length, device)
        self.kernels = {
            k: getattr(self.module, name)
            for k, (name, _) in KERNELS.items()
            if hasattr(self.module, name)
        }
        if job.capability:
            self.use()
            for name, value in list(vars(module).items()):
                if name.endswith("_kernel") and isinstance(value, JITFunction):
                    setattr(module, name, _Skipped())
        name = job.problem.name
        self.attention = prepare(name, self.load, {name: getattr(module, name)})
        self.out: Any = None

    def use(self, **watched: Any) -> None:
        """Replace these kernels with the objects in `watched`, and skip all others."""
        for kernel in self.kernels:
            setattr(self.module, KERNELS[kernel][0], watched.get(kernel, _Skipped()))

    def prepare_backward(self) -> None:
        """Run forward once. `run` computes its gradients again and again."""
        for tensor in (self.load.q, self.load.k, self.load.v):
            tensor.requires_grad_()
        self.out = self.attention(self.load.q, self.load.k, self.load.v)

    def run(self, kernel: str, tile: Tile) -> tuple[Any, ...]:
        """Return the outputs of a kernel with a tile."""
        getattr(self.module, KERNELS[kernel][1]).insert(0, ((self.chip,), asdict(tile)))
        load = self.load
        if kernel == "forward":
            with torch.no_grad():
                return (self.attention(load.q, load.k, load.v),)
        grads = torch.autograd.grad(
            self.out, (load.q, load.k, load.v), load.dout, retain_graph=True
        )
        return tuple(grads[:1] if kernel == "dq" else grads[1:])


def trials(job: TuneJob) -> Iterator[dict[str, Any]]:
    """Yield a line before and after each trial: its registers, spills and shared memory, or its
    milliseconds, or its error."""
    if job.capability:
        driver.set_active(OfflineDriver(job.capability))
    bench = Bench(job, "cpu" if job.capability else "cuda")
    try_one = _compiled if job.capability else _timed
    if "dq" in bench.kernels:
        bench.prepare_backward()
    expected: dict[str, tuple[Any, ...]] = {}
    for number, (kernel, tile) in enumerate(job.trials):
        yield {"start": number}
        try:
            found = try_one(bench, kernel, tile, expected)
            yield {"trial": number, "error": None, **found}
        except Exception as error:
            traceback.print_exc()
            yield {"trial": number, "error": f"{type(error).__name__}: {error}"[:300]}


def _compiled(bench: Bench, kernel: str, tile: Tile, _: Any) -> dict[str, Any]:
    compiler = _Compiler(bench.kernels[kernel])
    bench.use(**{kernel: compiler})
    bench.run(kernel, tile)
    return compiler.found


def _timed(
    bench: Bench, kernel: str, tile: Tile, expected: dict[str, tuple[Any, ...]]
) -> dict[str, Any]:
    watch = _Stopwatch(bench.kernels[kernel])
    bench.use(**{kernel: watch})
    found = bench.run(kernel, tile)  # compiles, or reads the cache
    if (apart := distance(found, expected.setdefault(kernel, found))) > AGREE:
        raise ArithmeticError(f"disagrees with the first tile: relative distance {apart:.2e}")
    watch.events.clear()
    for _ in range(ROUNDS):
        bench.run(kernel, tile)
    return {"milliseconds": watch.median()}


def main(job: TuneJob, lines: IO[str]) -> None:
    """Run a job."""
    for line in trials(job):
        print(json.dumps(line), file=lines, flush=True)


if __name__ == "__main__":
    serve(main)
