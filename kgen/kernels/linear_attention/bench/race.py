"""The race of linear_attention against its peers and a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from kgen.kernels.linear_attention.bench.peers import (
    Workload,
    draw_workload,
    nbytes,
    prepare,
    prepare_steps,
)


def race(job: BenchJob, functions: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield rows per pass and number of tokens. Both form the name of the pass.

    Decoding is named by its number of states.
    """
    problem, shape = job.problem, job.shape
    first_one = draw_workload(problem, shape, shape.tokens[0], shape.batch, job.device)
    facts = {name: list(t.shape) for name, t in first_one.tensors.items()}
    yield {"workload": {"shape": facts, "dtype": problem.dtype, "tokens": list(shape.tokens)}}
    for tokens in shape.tokens:
        workload = draw_workload(problem, shape, tokens, shape.batch, job.device)
        for pass_ in (name for name in problem.passes if name != "decode"):
            label = f"{pass_} {tokens}" + (f" in {shape.batch}" if shape.batch > 1 else "")
            backward = pass_ == "backward"
            moved = nbytes(workload, backward)
            runs = {n: _prepared(n, workload, functions, backward) for n in job.peers_of(backward)}
            yield from _pass_rows(job, runs, moved, label)
    for states in shape.states if "decode" in problem.passes else ():
        workload = draw_workload(problem, shape, 1, states, job.device)
        yield from _step_rows(job, workload, functions, states)


def _prepared(
    name: str, workload: Workload, functions: Mapping[str, Any], backward: bool
) -> Callable[[], Callable[[], Any]]:
    return lambda: prepare(name, workload, functions, backward)


def _step_rows(
    job: BenchJob, workload: Workload, functions: Mapping[str, Any], states: int
) -> Iterator[dict[str, Any]]:
    """Yield the rows of the emitted function that steps states, and of a copy of these states."""
    moved, runs = 0, {}
    for name, function in functions.items():
        decode = function.__globals__[f"{job.problem.name}_decode"]
        run, moved = prepare_steps(decode, workload, states)
        runs[name] = lambda run=run: run
    yield from _pass_rows(job, runs, moved, f"decode {states}")


def _pass_rows(
    job: BenchJob, runs: Mapping[str, Callable[[], Callable[[], Any]]], moved: int, label: str
) -> Iterator[dict[str, Any]]:
    failed: dict[str, Failure] = {}
    found: list[Contender] = []
    want: Any = None
    with preparing(job):
        for name, make in runs.items():
            try:
                run, got, seconds = first(make, job.device)
                want = got if want is None else want
                apart = distance(got, want[: len(got)])
                if apart > AGREE:
                    text = f"disagrees with {found[0].name}: relative distance {apart:.2e}"
                    raise ArithmeticError(text)
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
    if job.device == "cuda":
        torch.cuda.empty_cache()
