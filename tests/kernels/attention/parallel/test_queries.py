"""Calls of the backward pass with the same queries: the values that they share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kgen.kernels.attention.parallel import partial_sums
from kgen.kernels.attention.parallel.call_plans import Kernels
from kgen.kernels.attention.parallel.planning import Pair, Plan
from kgen.kernels.attention.parallel.queries import Attended, Queries
from kgen.kernels.attention.parallel.runtime import Call, backward
from kgen.kernels.attention.parallel.sharding import Sharding

KEYS = [(0, 10), (10, 24), (24, 40)]
"""Key ranges of the calls. The second call does not share."""


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Module:
    """Plain PyTorch version of the kernels for a causal mask with sinks.

    Calls add to one sum of dq, except for the keys that cannot share it.
    """

    def __init__(self, shares: bool) -> None:
        self.asked: list[tuple[int, int, bool]] = []
        if shares:
            self.part_begin = self._begin

    def _begin(
        self, dout: Tensor, dlse: Tensor, out: Tensor, lse: Tensor, q: Tensor, *rest: Tensor
    ) -> Any:
        _, _, sinks, dq = rest
        assert dq.shape == q.shape
        weight = (sinks[:, None] - lse * math.log(2)).exp()
        delta = (dout * out).sum(-1) - dlse / math.log(2)
        dq_sum = torch.zeros_like(q)
        return SimpleNamespace(
            dout=dout, delta=delta, dq_sum=dq_sum, dq=dq, d_sinks=-(weight * delta).sum((0, 2))
        )

    def part_end(self, shared: Any, scale: float) -> None:
        shared.dq.copy_(scale * shared.dq_sum)

    def _gradients(self, *args: Any, shared: Any = None) -> tuple[Any, ...]:
        dout, dlse, out, lse, q, k, v, sinks, scale, q_start, kv_start = args
        self.asked.append((q.shape[2], k.shape[2], shared is not None))
        seen = (q_start + torch.arange(q.shape[2]))[:, None] >= kv_start + torch.arange(k.shape[2])
        p = (scale * q @ k.mT - lse[..., None] * math.log(2)).exp().masked_fill(~seen, 0.0)
        delta = (dout * out).sum(-1) - dlse / math.log(2)
        ds = p * (dout @ v.mT - delta[..., None])
        weight = (sinks[:, None] - lse * math.log(2)).exp()
        found = scale * ds.mT @ q, p.mT @ dout
        if shared is not None and kv_start != KEYS[1][0]:
            shared.dq_sum.add_(ds @ k)
            return None, *found, torch.zeros_like(sinks)
        return scale * ds @ k, *found, -(weight * delta).sum((0, 2))

    _backward_op = _gradients


def summed(out: Tensor, parts: list[Tensor], lse: None, lses: list[Tensor]) -> None:
    """Add the parts, as the kernel of sums does."""
    out.copy_(torch.stack(parts).sum(0))


def test_what_is_not_shared_stays_where_it_was_stored() -> None:
    """On such a GPU kernels share nothing, although the file has shared kernels for others."""
    x, lse = torch.randn(2, 3, 40, 8), torch.randn(2, 3, 40)
    one = Sharding((((0, 40),),))
    total = partial_sums.Sum(x.shape, x, 2)
    queries = Queries(Plan(one, one, ()), 0, 2, Attended(x, None, x, lse, x))
    module = SimpleNamespace(part_begin=lambda *_: None)
    assert queries.begin(module, "part", x, x, None, total) is None
    dq = torch.randn(x.shape)
    total.add((0, 40), dq)
    assert total.result() is dq


@pytest.mark.parametrize("shares", [False, True])
def test_gradients_are_those_of_all_keys(shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_sums, "merge", summed)
    torch.manual_seed(0)
    q, k, v, dout = (
        torch.randn(2, 3, 40, 8, dtype=torch.float64, requires_grad=True) for _ in range(4)
    )
    sinks = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    dlse = torch.randn(2, 3, 40, dtype=torch.float64)
    scores = (0.3 * q @ k.mT).masked_fill(~torch.ones(40, 40, dtype=torch.bool).tril(), -math.inf)
    lse = torch.cat([scores, sinks[:, None, None].expand(2, 3, 40, 1)], -1).logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ v
    wanted = torch.autograd.grad([out, lse / math.log(2)], [q, k, v, sinks], [dout, dlse])
    module = Module(shares)
    kernels = Kernels(
        lambda q, v: module, "part", views=(), tensors=(), numbers=("q_start", "kv_start"),
        learned=(), places=("q_start", "kv_start"), packed=False, listed=False, keys=lambda: (),
        queries=None, reads=(), sinks=True,
    )  # fmt: skip
    one = Sharding((((0, 40),),))
    pairs = [Pair(0, 0, (lo, 40), (lo, hi)) for lo, hi in KEYS]
    plan = Plan(one, one, tuple(pairs))
    world = dist.distributed_c10d._get_default_group()
    call = Call(kernels, plan, world, {"scale": 0.3}, 0, lambda: None)
    with torch.no_grad():
        dq, dk, dv, learned = backward(
            call, Attended(dout, dlse, out, lse / math.log(2), q), k, v, sinks
        )
    for got, want in zip((dq, dk, dv, learned["sinks"]), wanted, strict=True):
        assert torch.allclose(got.to(want.dtype), want, rtol=0, atol=1e-6)
    if shares:  # with all queries of the run
        assert module.asked == [(40, hi - lo, True) for lo, hi in KEYS]
    else:  # with the queries that see the keys; rows with sinks are separate
        assert {(rows, shared) for rows, _, shared in module.asked} == {
            (40, False),
            (30, False),
            (16, False),
        }
