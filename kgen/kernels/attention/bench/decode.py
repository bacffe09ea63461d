"""Race of decoding: one query per sequence, for several cache lengths.

The kernel reads K and V once, so rates are in bytes per second. A copy of 1 GiB is measured too,
and counts bytes read and written. Times are between two events on the stream. Enough work is queued
before them that launches cost nothing, as in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kgen.bench.timing import BenchJob, copy, failures, measure, measuring, preparing, rows
from kgen.kernels.attention.bench.contenders import contenders, prepared
from kgen.kernels.attention.bench.workload import draw_workload, visible


def race_decode(job: BenchJob, functions: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield rows per cache length. The pass is named `decode LENGTH`."""
    problem, shape = job.problem, job.shape
    batch, heads = shape.decode
    for length in shape.caches:
        workload = draw_workload(problem, batch, heads, length, job.device, queries=1)
        size = workload.sizes
        # A KV head reads each visible key once, for any number of query heads.
        keys = visible(workload) * size["HKV"] // size["HQ"]
        work = keys * (problem.head_qk + problem.head_v) * workload.k.element_size()
        with preparing(job):
            attentions, failed = prepared(job, workload, functions)
            found = contenders("decode", workload, attentions, failed, job.device)
            nbytes = 2**31 if job.device == "cuda" else 2**17
            memory = copy(nbytes, job.device)
        with measuring(job):
            measure([*found, memory], job)
        pass_ = f"decode {size['SK']}"
        yield from rows(pass_, found, {"tbps": work / 1e9})
        yield from rows(pass_, [memory], {"tbps": nbytes / 1e9})
        yield from failures(pass_, failed)
        del workload, attentions, found, memory
        if job.device == "cuda":
            torch.cuda.empty_cache()
