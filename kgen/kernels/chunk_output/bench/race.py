"""The race of chunk_output against its peers and a copy: one sequence, and ragged ones for packed
specs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from kgen.kernels.chunk_output.bench.peers import (
    Workload,
    draw_workload,
    nbytes,
    prepare,
)


def race(job: BenchJob, functions: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield rows per pass, number of tokens and packing. These three form the name of the pass."""
    problem, shape = job.problem, job.shape
    told = False
    for tokens in shape.tokens:
        # Sequences shorter than about a chunk are of no interest.
        ragged = max(2, min(shape.ragged, tokens // problem.chunk_size))
        for pieces in (1, ragged) if problem.varlen else (1,):
            workload = draw_workload(problem, shape, tokens, pieces, job.device)
            if not told:
                facts = {name: list(t.shape) for name, t in workload.tensors.items()}
                yield {
                    "workload": {
                        "shape": facts,
                        "dtype": problem.dtype,
                        "tokens": list(shape.tokens),
                    }
                }
                told = True
            for pass_ in problem.passes:
                label = f"{pass_} {tokens}" + (f" in {pieces}" if pieces > 1 else "")
                yield from _pass_rows(job, workload, functions, pass_ == "backward", label)
                if job.device == "cuda":
                    torch.cuda.empty_cache()


def _pass_rows(
    job: BenchJob, workload: Workload, functions: Mapping[str, Any], backward: bool, label: str
) -> Iterator[dict[str, Any]]:
    moved = nbytes(workload, backward)
    failed: dict[str, Failure] = {}
    found: list[Contender] = []
    want: Any = None
    with preparing(job):
        for name in job.peers_of(backward):
            try:
                run, got, seconds = first(
                    lambda: prepare(name, workload, functions, backward),  # noqa: B023
                    job.device,
                )
                want = got if want is None else want
                if (apart := distance(got, want[: len(got)])) > AGREE:
                    raise ArithmeticError(
                        f"disagrees with {found[0].name}: relative distance {apart:.2e}"
                    )
                found.append(Contender(name, run, seconds, distance=apart))
            except DoesNotApply:
                continue
            except Exception as error:
                failed[name] = failure(error)
        found.append(copy(moved, job.device))
    with measuring(job):
        measure(found, job)
    yield from rows(label, found, {"tbps": moved / 1e9})
    yield from failures(label, failed)
