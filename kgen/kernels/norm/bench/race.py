"""The race of a norm, width by width: forward, and backward if the spec has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from kgen.bench.peers import DoesNotApply
from kgen.bench.timing import (
    AGREE,
    BenchJob,
    Contender,
    Failure,
    copy,
    distance,
    failure,
    failures,
    first,
    measure,
    measuring,
    preparing,
    rows,
)
from kgen.kernels.norm.bench.peers import Norm, Workload, draw_workload, prepare
from kgen.kernels.norm.bench.shape import SMALL


def race(job: BenchJob, functions: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the workload, then rows per width and pass. `functions` are the emitted functions by
    peer name."""
    problem = job.problem
    sizes = job.shape.sizes(problem.widths)
    yield {"workload": {"sizes": sizes, "dtypes": dict(problem.dtypes), "norm": problem.norm}}
    passes = ("forward", *(["backward"] if "backward" in problem.passes else []))
    for n_rows, width in sizes:
        graph = (n_rows, width) == SMALL and job.device == "cuda"
        place = {"rows": n_rows, "width": width, "graph": graph}
        ready = []
        with preparing(job):
            for pass_ in passes:
                workload = draw_workload(problem, n_rows, width, job.device)
                work = {"tbps": workload.bytes_moved(pass_) / 1e9}
                ready.append((pass_, work, *_contenders(pass_, workload, job, functions, graph)))
        with measuring(job):
            for pass_, work, contenders, failed in ready:
                if contenders:
                    measure(contenders, job)
                    yield from ({**row, **place} for row in rows(pass_, contenders, work))
                yield from ({**row, **place} for row in failures(pass_, failed))
            if job.device == "cuda":
                torch.cuda.empty_cache()
        del ready, contenders, workload


def _contenders(
    pass_: str, workload: Workload, job: BenchJob, functions: Mapping[str, Any], graph: bool
) -> tuple[list[Contender], dict[str, Failure]]:
    """Return the peers that run and agree with kgen, or else with the first that runs; and the
    errors of the others."""
    backward = pass_ == "backward"
    for tensor in workload.wanted:
        tensor.requires_grad_(backward)
    found: list[Contender] = []
    failed: dict[str, Failure] = {}
    want: Sequence[Any] | None = None
    # Backward runs on the stream of its forward, which must be the captured stream.
    stream = torch.cuda.Stream() if graph else None
    for name in job.peers:
        try:
            if name == "copy":
                run, seconds = copy(workload.bytes_moved(pass_), job.device).run, 0.0
            else:
                norm = prepare(name, workload, functions)
                make = (
                    (lambda n: lambda: _gradients(n, workload))(norm)
                    if backward
                    else _forward(norm)
                )
                with torch.cuda.stream(stream) if stream is not None else nullcontext():
                    run, result, seconds = first(make, job.device)
                got = [t.detach().float() for t in result]
                if want is None:
                    want = got
                elif (apart := distance(got[: len(want)], want[: len(got)])) > AGREE:
                    raise ArithmeticError(
                        f"disagrees with {found[0].name}: relative distance {apart:.2e}"
                    )
            found.append(
                Contender(name, _graphed(run, stream) if stream is not None else run, seconds)
            )
        except DoesNotApply:
            continue
        except Exception as error:
            failed[name] = failure(error)
    return found, failed


def _forward(norm: Norm) -> Callable[[], Callable[[], Any]]:
    def run() -> Any:
        with torch.no_grad():
            return norm()

    return lambda: run


def _gradients(norm: Norm, workload: Workload) -> Callable[[], Any]:
    outputs = norm()
    cotangents = list(workload.cotangents.values())[: len(outputs)]
    return lambda: torch.autograd.grad(outputs, workload.wanted, cotangents, retain_graph=True)


def _graphed(run: Callable[[], Any], stream: Any) -> Callable[[], Any]:
    """Capture a call in a CUDA graph, which removes Python's launch time."""
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = run()

    def replay() -> tuple[Any, ...]:
        graph.replay()
        return run, result  # the graph holds only addresses; these two own the memory

    return replay
