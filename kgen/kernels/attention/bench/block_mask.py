"""Time to build a block mask, compared with compiled `create_block_mask`. Both must list the same
blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kgen.bench.timing import (
    BenchJob,
    Contender,
    Failure,
    failure,
    failures,
    first,
    measure,
    measuring,
    preparing,
    rows,
)
from kgen.kernels.attention.bench.peers import create_block_mask, emitted_block_mask
from kgen.kernels.attention.bench.workload import Workload


def race_block_mask(
    job: BenchJob, workload: Workload, functions: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield rows of the pass `block mask`.

    The lists have a batch or head dimension only if the mask depends on it, for both contenders.
    """
    makers: dict[str, Callable[[], Any]] = {
        name: (lambda function=function: emitted_block_mask(function, workload))  # type: ignore[misc]
        for name, function in functions.items()
    }
    if any(peer.startswith("flex") for peer in job.peers):
        makers["flex"] = create_block_mask(workload, compiled=True)
    found: list[Contender] = []
    failed: dict[str, Failure] = {}
    want: list[Tensor] | None = None
    with preparing(job):
        for name, make in makers.items():
            try:
                run, result, seconds = first(lambda: make, job.device)  # noqa: B023
                got = listed(result)
                want = got if want is None else want
                if not all(torch.equal(a, b) for a, b in zip(got, want, strict=True)):
                    raise ArithmeticError(f"lists other blocks than {found[0].name}")
                found.append(Contender(name, run, seconds))
            except Exception as error:
                failed[name] = failure(error)
    with measuring(job):
        measure(found, job)
    yield from rows("block mask", found, {})
    yield from failures("block mask", failed)


def listed(mask: Any) -> list[Tensor]:
    """Return how many blocks of keys are partial and full per block of queries, and their indices.

    `mask` is an emitted block mask or a `BlockMask` of PyTorch. Unused indices are -1.
    """
    numbers, full_numbers, indices = mask.kv_num_blocks, mask.full_kv_num_blocks, mask.kv_indices
    column = torch.arange(indices.shape[-1], device=indices.device)
    if hasattr(mask, "full_kv_indices"):
        full = mask.full_kv_indices
    else:
        # Full blocks follow the partial ones.
        full = indices.gather(-1, (column + numbers[..., None]).clamp(max=len(column) - 1).long())
    parts = [(numbers, indices), (full_numbers, full)]
    return [t for n, i in parts for t in (n, torch.where(column < n[..., None], i, -1))]
