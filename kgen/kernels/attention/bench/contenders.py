"""Select the peers that can run a pass of attention and agree on its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kgen.bench.peers import DoesNotApply
from kgen.bench.timing import AGREE, BenchJob, Contender, Failure, distance, failure, first
from kgen.kernels.attention.bench.libraries import Attention
from kgen.kernels.attention.bench.peers import prepare
from kgen.kernels.attention.bench.workload import Workload


def prepared(
    job: BenchJob, workload: Workload, functions: Mapping[str, Any]
) -> tuple[dict[str, Attention], dict[str, Failure]]:
    """Return the peers that can compute a spec, and the errors of the others."""
    attentions: dict[str, Attention] = {}
    failed: dict[str, Failure] = {}
    for name in job.peers:
        try:
            attentions[name] = prepare(name, workload, functions)
        except DoesNotApply:
            continue
        except Exception as error:
            failed[name] = failure(error)
    return attentions, failed


def contenders(
    pass_: str,
    workload: Workload,
    attentions: dict[str, Attention],
    failed: dict[str, Failure],
    device: str,
) -> list[Contender]:
    """Return the peers that run a pass and agree with kgen, or else with the first peer that runs.

    Peers that fail are moved from `attentions` to `failed`.
    """
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
                raise ArithmeticError(
                    f"disagrees with {found[0].name}: relative distance {apart:.2e}"
                )
            found.append(Contender(name, run, seconds))
        except Exception as error:
            failed[name] = failure(error)
            del attentions[name]
    return found


def _runner(
    attention: Attention, workload: Workload, wanted: Sequence[Any] | None
) -> Callable[[], Any]:
    q, k, v = workload.q, workload.k, workload.v
    if wanted is None:

        def forward() -> Any:
            with torch.no_grad():
                return attention(q, k, v)

        return forward
    out = attention(q, k, v)
    return lambda: torch.autograd.grad(out, wanted, workload.dout, retain_graph=True)
