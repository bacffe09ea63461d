"""Random schedules of an engine: results of `deterministic: batch` must not depend on them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kgen.kernels.attention.verify import serving
from kgen.kernels.attention.verify.problem import Problem
from kgen.kernels.attention.verify.serving import Batch, Served
from kgen.verify import compare
from kgen.verify.families import Subject

REQUESTS = Batch("requests", ((70, 70), (40, 130), (5, 5), (12, 2300), (1, 33), (30, 4200)), 64)
"""New queries and all keys of each request. Earlier tokens are in the cache, as after a hit of a
prefix."""
CROWD = replace(
    REQUESTS,
    lengths=(
        *REQUESTS.lengths,
        *((7 * i % 23 + 1, 7 * i % 23 + 1 + 13 * i % 90) for i in range(58)),
    ),
)
"""64 requests."""
Part = tuple[int, int, int]
"""A request, and its first and last new token of one call."""


def keep_bits(subject: Subject, schedules: int = 3, requests: Batch = REQUESTS) -> None:
    """Check that schedules with other cuts, orders and neighbors give the same bits."""
    problem = subject.problem
    batch = requests if problem.gqa == "any" else replace(requests, group=int(problem.gqa))
    served = serving.drawn(problem, batch, subject.device)
    alone = _run(subject, served, ([(r, 0, new)] for r, (new, _) in enumerate(batch.lengths)))
    for seed in range(schedules):
        found = _run(subject, served, _schedule(batch, seed))
        for name, one, other in zip(("out", "lse", "row_max"), found, alone, strict=False):
            same = compare.same_bits(one, other)
            assert same, f"{name} of schedule {seed} differs from each request alone"


def _schedule(batch: Batch, seed: int) -> Iterator[list[Part]]:
    """Yield the parts of each call."""
    choose = random.Random(seed)
    done = dict.fromkeys(range(len(batch.lengths)), 0)
    while done:
        chosen = choose.sample(sorted(done), choose.randint(1, len(done)))
        step = list[Part]()
        for request in chosen:
            first, (new, _) = done[request], batch.lengths[request]
            end = min(new, first + choose.choice((1, 1, 2, 7, 33, 100)))
            step.append((request, first, end))
            done[request] = end
            if end == new:
                del done[request]
        yield step


def _run(subject: Subject, served: Served, steps: Any) -> list[Tensor]:
    """Return the outputs of all new tokens after all steps."""
    count = 2 if subject.problem.row_max else 1
    out, of_rows = (
        torch.empty_like(served.out),
        [torch.empty_like(served.lse) for _ in range(count)],
    )
    starts = served.inputs.cu_seqlens[0].tolist()
    for step in steps:
        rows = [range(starts[r] + first, starts[r] + end) for r, first, end in step]
        at = torch.tensor([row for part in rows for row in part], device=out.device)
        out[at], *found = _called(subject, served, step, at)
        for x, part in zip(of_rows, found, strict=True):
            x[:, at] = part
    return [out, *of_rows]


def _called(subject: Subject, served: Served, step: list[Part], at: Tensor) -> tuple[Tensor, ...]:
    """Return the outputs of one call."""
    problem, inputs, lengths = subject.problem, served.inputs, served.batch.lengths
    own = torch.tensor([request for request, _, _ in step], device=at.device)
    keys = [lengths[r][1] - lengths[r][0] + end for r, _, end in step]
    ends = torch.tensor([0, *(end - first for _, first, end in step)], device=at.device)
    queries = (ends.cumsum(0).to(torch.int32), inputs.cu_seqlens[1])
    buffers = {**inputs.buffers, **_of_sequences(problem, inputs.buffers, own)}
    part = replace(
        served,
        batch=replace(served.batch, given=False, lengths=tuple((0, n) for n in keys)),
        inputs=replace(inputs, q=inputs.q[at], cu_seqlens=queries, buffers=buffers),
        block_table=served.block_table[own],
        seq_lens=torch.tensor(keys, dtype=torch.int32, device=at.device),
    )
    asked = {"return_max": True} if problem.row_max else {}
    found: tuple[Tensor, ...] = serving.call(vars(subject.module), problem, part, **asked)
    return found


def _of_sequences(problem: Problem, buffers: dict[str, Tensor], own: Tensor) -> dict[str, Tensor]:
    """Return the buffers with an entry for each sequence, for some sequences."""
    return {
        b.name: buffers[b.name].index_select(axis, own)
        for b in problem.buffers
        for axis, size in enumerate(b.shape)
        if size == "B"
    }
