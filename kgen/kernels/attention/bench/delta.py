"""Race of the emitted delta, rowsum(dO * O), against PyTorch and a copy of the same number of
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

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
from kgen.kernels.attention.bench.workload import Workload
from kgen.verify.toolchain import import_file


def race_delta(job: BenchJob, workload: Workload) -> Iterator[dict[str, Any]]:
    """Yield rows of the pass `delta`. As in training, dO is [B, S, H, D] and O is [B, H, S, D] in
    memory order."""
    name = f"{job.problem.name}_delta"
    out = torch.randn_like(workload.dout)
    dout = workload.dout.transpose(1, 2).contiguous().transpose(1, 2)
    found: list[Contender] = []
    failed: dict[str, Failure] = {}
    with preparing(job):
        makers: Mapping[str, Callable[[], Callable[..., Tensor]]] = {
            "kgen": lambda: getattr(import_file(job.parts["delta"], f"kgen_emitted_{name}"), name),
            "compile": lambda: torch.compile(_delta),
            "eager": lambda: _delta,
        }
        want: Tensor | None = None
        for peer, make in makers.items():
            try:
                run, got, seconds = first(lambda: _call(make(), out, dout), job.device)  # noqa: B023
                want = got if want is None else want
                if (apart := distance([got], [want])) > AGREE:
                    raise ArithmeticError(
                        f"disagrees with {found[0].name}: relative distance {apart:.2e}"
                    )
                found.append(Contender(peer, run, seconds, distance=apart))
            except Exception as error:
                failed[peer] = failure(error)
        moved = sum(t.nbytes for t in (out, dout, want) if t is not None)
        found.append(copy(moved, job.device))
    with measuring(job):
        measure(found, job)
    yield from rows("delta", found, {"tbps": moved / 1e9})
    yield from failures("delta", failed)


def _delta(out: Tensor, dout: Tensor) -> Tensor:
    return (out.float() * dout.float()).sum(-1)


def _call(function: Callable[..., Tensor], out: Tensor, dout: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.no_grad():
            return function(out, dout)

    return run
