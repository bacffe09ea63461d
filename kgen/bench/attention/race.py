"""Attention against its peers: forward, and backward where there is one."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from kgen.bench.attention.peers import Attention, DoesNotApply, Workload, draw_workload, prepare, visible
from kgen.bench.timing import (
    AGREE,
    BenchJob,
    Contender,
    distance,
    first,
    measure,
    measuring,
    message,
    preparing,
    rows,
)


def race(job: BenchJob, functions: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The workload, then rows for each pass. `functions` are the emitted ones by peer name."""
    problem, shape = job.problem, job.shape
    workload = draw_workload(problem, shape.batch, shape.heads, shape.length, job.device)
    size, pairs = workload.sizes, visible(workload)
    fraction = pairs / (size["B"] * size["HQ"] * size["SQ"] * size["SK"])
    facts = {**size, "D": problem.head_qk, "DV": problem.head_v, "dtype": problem.dtype}
    if workload.packing is not None:
        facts["sequences"] = len(workload.packing.cu_seqlens) - 1
    yield {"workload": {"shape": facts, "fraction": round(fraction, 6)}}
    if job.first_call:
        from kgen.bench.attention.first_call import first_calls

        with measuring(job):
            yield from first_calls(job, workload)
        return
    flops = 2.0 * pairs * (problem.head_qk + problem.head_v)
    if problem.block_mask:
        from kgen.bench.attention.block_mask import race_block_mask

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
            yield from ({"pass": pass_, "peer": name, "error": text} for name, text in without.items())
            found.clear()
            if job.device == "cuda":
                torch.cuda.empty_cache()
    if "decode" in problem.passes:
        from kgen.bench.attention.decode import race_decode

        del workload, attentions
        yield from race_decode(job, functions)


def prepared(
    job: BenchJob, workload: Workload, functions: Mapping[str, Any]
) -> tuple[dict[str, Attention], dict[str, str]]:
    """The peers that can compute a spec, and what went wrong with the others."""
    attentions: dict[str, Attention] = {}
    failed: dict[str, str] = {}
    for name in job.peers:
        try:
            attentions[name] = prepare(name, workload, functions)
        except DoesNotApply:
            continue
        except Exception as error:
            failed[name] = message(error)
    return attentions, failed


def contenders(
    pass_: str,
    workload: Workload,
    attentions: dict[str, Attention],
    failed: dict[str, str],
    device: str,
) -> list[Contender]:
    """The peers that run and agree with kgen, or else with the first that runs; others go to `failed`."""
    backward = pass_ == "backward"
    grads = [workload.buffers[b.name] for b in workload.problem.buffers if b.grad]
    wanted = [workload.q, workload.k, workload.v, *grads]
    for tensor in wanted:
        tensor.requires_grad_(backward)
    found: list[Contender] = []
    want: Sequence[Any] | None = None
    for name, attention in list(attentions.items()):
        try:
            grads_of = wanted if backward else None
            run, result, seconds = first(lambda: _runner(attention, workload, grads_of), device)  # noqa: B023
            got = [t.detach() for t in (result if backward else [result])]
            if want is None:
                want = got
            elif (apart := distance(got[: len(want)], want)) > AGREE:
                raise ArithmeticError(f"disagrees with {found[0].name}: relative distance {apart:.2e}")
            found.append(Contender(name, run, seconds))
        except Exception as error:
            traceback.print_exc()
            failed[name] = message(error)
            del attentions[name]
    return found


def _runner(attention: Attention, workload: Workload, wanted: Sequence[Any] | None) -> Callable[[], Any]:
    q, k, v = workload.q, workload.k, workload.v
    if wanted is None:

        def forward() -> Any:
            with torch.no_grad():
                return attention(q, k, v)

        return forward
    out = attention(q, k, v)
    return lambda: torch.autograd.grad(out, wanted, workload.dout, retain_graph=True)
