"""The race of attention: forward, and backward if the spec has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kgen.bench.timing import BenchJob, failures, measure, measuring, preparing, rows
from kgen.kernels.attention.bench.block_mask import race_block_mask
from kgen.kernels.attention.bench.contenders import contenders, prepared
from kgen.kernels.attention.bench.decode import race_decode
from kgen.kernels.attention.bench.delta import race_delta
from kgen.kernels.attention.bench.first_call import first_calls
from kgen.kernels.attention.bench.workload import draw_workload, visible


def race(job: BenchJob, functions: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the workload, then rows per pass.

    `functions` are the emitted functions by peer name.
    """
    problem, shape = job.problem, job.shape
    workload = draw_workload(
        problem,
        shape.batch,
        shape.heads,
        shape.length,
        job.device,
        kv_heads=shape.kv_heads,
        documents=shape.documents,
    )
    size, pairs = workload.sizes, visible(workload)
    fraction = pairs / (size["B"] * size["HQ"] * size["SQ"] * size["SK"])
    facts = {**size, "D": problem.head_qk, "DV": problem.head_v, "dtype": problem.dtype}
    if workload.packing is not None:
        facts["sequences"] = len(workload.packing.cu_seqlens) - 1
    yield {"workload": {"shape": facts, "fraction": round(fraction, 6)}}
    if job.first_call:
        with measuring(job):
            yield from first_calls(job, workload)
        return
    flops = 2.0 * pairs * (problem.head_qk + problem.head_v)
    if problem.block_mask:
        yield from race_block_mask(job, workload, functions)
    ready = []
    with preparing(job):
        attentions, failed = prepared(job, workload, functions)
        for pass_ in ("forward", *(["backward"] if "backward" in problem.passes else [])):
            found = contenders(pass_, workload, attentions, failed, job.device)
            ready.append((pass_, found, dict(failed)))
    with measuring(job):
        for pass_, found, without in ready:
            measure(found, job)
            work = flops * (2.5 if pass_ == "backward" else 1.0)
            yield from rows(pass_, found, {"tflops": work / 1e9})
            yield from failures(pass_, without)
            found.clear()
            if job.device == "cuda":
                torch.cuda.empty_cache()
    if "delta" in job.parts:
        yield from race_delta(job, workload)
    if "decode" in problem.passes:
        del workload, attentions
        yield from race_decode(job, functions)
