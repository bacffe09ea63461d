"""Decoding against its peers: one query for each sequence, over caches of several lengths.

The work is to read K and V once, so rates are bytes per second, and beside the peers stands a copy of a gibibyte, which
counts what it reads and what it writes. Times are between two events on the stream, behind enough work on the GPU that
launching costs nothing: what a CUDA graph would see.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kgen.bench.timing import BenchJob, copy, measure, measuring, preparing, rows
from kgen.kernels.attention.bench.contenders import contenders, prepared
from kgen.kernels.attention.bench.workload import draw_workload, visible


def race_decode(job: BenchJob, functions: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows for each length of cache; the pass is called `decode` and the length."""
    problem, shape = job.problem, job.shape
    batch, heads = shape.decode
    for length in shape.caches:
        workload = draw_workload(problem, batch, heads, length, job.device, queries=1)
        size = workload.sizes
        # Each visible key is read once for a KV head, whatever the number of query heads.
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
        yield from ({"pass": pass_, "peer": name, "error": text} for name, text in failed.items())
        del workload, attentions, found, memory
        if job.device == "cuda":
            torch.cuda.empty_cache()
