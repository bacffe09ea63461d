"""Compiles or times the kernels of one emitted file, tile by tile: `python -m kgen.kernels.attention.tune.worker JOB`.

JOB is a pickled `TuneJob`. Standard output carries a JSON line before each trial and one after it, so that whoever
reads knows which one a worker died of.
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
"""How far results with another tile may be from those with the first, as a relative Frobenius norm."""


class _Skipped:
    """In place of a kernel that is not being looked at."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class _Stopwatch:
    """In place of a kernel: launches it between two events."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.events: list[tuple[Any, Any]] = []
        # Zeroing it empties L2, and takes long enough to hide what a launch takes the CPU.
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
        """Milliseconds of the launches so far."""
        torch.cuda.synchronize()
        return float(statistics.median(start.elapsed_time(end) for start, end in self.events))


class _Compiler:
    """In place of a kernel: compiles what would be launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.found: dict[str, Any] = {}

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            made = JITFunction.run(self.kernel, *args, grid=grid, warmup=True, **kwargs)
            registers, spills = resources(made.asm["cubin"])
            self.found = {"registers": registers, "spills": spills, "shared": int(made.metadata.shared)}

        return launch


class Bench:
    """One emitted module and its inputs, of which one kernel runs at a time."""

    def __init__(self, job: TuneJob, device: str) -> None:
        module: Any = import_file(job.path, f"kgen_emitted_{job.problem.name}")
        self.chip = chip = job.capability or module._arch(torch.device(device))
        module._arch = lambda device: chip
        take_portable_kernels(module)  # only kernels with tables of tiles are tuned
        self.module = module
        shape = job.shape
        self.load = draw_workload(job.problem, shape.batch, shape.heads, shape.length, device)
        self.kernels = {
            k: getattr(self.module, name) for k, (name, _) in KERNELS.items() if hasattr(self.module, name)
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
        """Launch these kernels through something else, and no others."""
        for kernel in self.kernels:
            setattr(self.module, KERNELS[kernel][0], watched.get(kernel, _Skipped()))

    def prepare_backward(self) -> None:
        """A forward pass, whose gradients are then taken again and again."""
        for tensor in (self.load.q, self.load.k, self.load.v):
            tensor.requires_grad_()
        self.out = self.attention(self.load.q, self.load.k, self.load.v)

    def run(self, kernel: str, tile: Tile) -> tuple[Any, ...]:
        """The outputs of `kernel` with a tile."""
        getattr(self.module, KERNELS[kernel][1]).insert(0, ((self.chip,), asdict(tile)))
        load = self.load
        if kernel == "forward":
            with torch.no_grad():
                return (self.attention(load.q, load.k, load.v),)
        grads = torch.autograd.grad(self.out, (load.q, load.k, load.v), load.dout, retain_graph=True)
        return tuple(grads[:1] if kernel == "dq" else grads[1:])


def trials(job: TuneJob) -> Iterator[dict[str, Any]]:
    """A line before and after each trial: what the compiler says of it, or its median milliseconds, or its error."""
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


def _timed(bench: Bench, kernel: str, tile: Tile, expected: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    watch = _Stopwatch(bench.kernels[kernel])
    bench.use(**{kernel: watch})
    found = bench.run(kernel, tile)  # compiles, or reads what was compiled
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
