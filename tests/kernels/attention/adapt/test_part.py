"""Kernels for parts: calls of the backward pass that share delta and a sum of dq, against
float64.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.interpreters.own_process import interpreted
from support.interpreters.single_file import single
from torch import Tensor

from kgen.diagnostics import KgenError
from kgen.kernels.attention.adapt.part import part_of
from kgen.spec.load import loads

SPEC = """kernel: attention
name: attended
dtype: fp16
head_dim: 128
gqa: 2
sinks: true
mask_mod: q_idx >= kv_idx
"""
MISTAKES = {
    "": ("", ""),
    "delta of each call": ("shared = shared if on_hopper else None", "shared = None"),
    "counters as they were": ("q.new_empty if shared is None else q.new_zeros", "q.new_empty"),
    "dq without its scale": ("HQ, SQ, scale, num_warps=4)", "HQ, SQ, 1.0, num_warps=4)"),
}
"""Mistakes: a piece of the emitted text, and its wrong replacement."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_calls_of_some_keys_each_share_dq(mistake: str, tmp_path: Path) -> None:
    text = single(loads(part_of(loads(SPEC, "attended.yaml")).text(), "attended.yaml"))
    right, wrong = MISTAKES[mistake]
    assert not right or text.count(right) == 1
    path = tmp_path / "attended_part.py"
    path.write_text(text.replace(right, wrong) if right else text)
    assert bool(interpreted(differs, path)) == bool(mistake)


def differs(path: Path) -> list[str]:
    """Return the gradients that differ from the gradients of all keys at once."""
    from kgen.kernels.attention.schedules.hopper.verify import imported
    from kgen.verify import interpreter

    torch.set_num_threads(1)
    torch.manual_seed(0)
    interpreter.mend()
    module = imported(path, "kgen_test_part")
    module._in_one_kernel = lambda *_: True
    made = module.Tensor.new_empty
    # Fill uninitialized memory with an arbitrary number.
    module.Tensor.new_empty = lambda x, *size, **more: made(x, *size, **more).fill_(7)
    q, dout = (torch.randn(2, 4, 150, 128, dtype=torch.float16) for _ in range(2))
    k, v = (torch.randn(2, 2, 230, 128, dtype=torch.float16) for _ in range(2))
    sinks, dlse = torch.tensor([0.5, -1.0, -math.inf, 2.0]), torch.randn(2, 4, 150)
    start, scale, ends = 100, 0.1, (0, 90, 200, 230)
    wanted = by_hand(q, k, v, sinks, start, scale, dout, dlse)
    out, lse = wanted["out"].half(), wanted["lse"].float()
    dq = torch.full_like(q, math.nan)
    try:
        shared = module.attended_part_begin(dout, dlse, out, lse, q, k, v, sinks, dq)
        got: dict[str, list[Tensor]] = {"dk": [], "dv": []}
        for lo, hi in pairwise(ends):
            of_part = (
                k[:, :, lo:hi],
                v[:, :, lo:hi],
                torch.full_like(sinks, -1e30),
                scale,
                start,
                lo,
            )
            none, dk, dv, dsinks = module._gradients(
                dout, dlse, out, lse, q, *of_part, shared=shared
            )
            if none is not None or dsinks.any():
                return ["dq of a call"]
            got["dk"].append(dk)
            got["dv"].append(dv)
        module.attended_part_end(shared, scale)
    finally:
        module.Tensor.new_empty = made
    found = {n: torch.cat(parts, 2) for n, parts in got.items()} | {
        "dq": dq,
        "dsinks": shared.d_sinks,
    }
    return [
        n
        for n, x in found.items()
        if not (x.double() - wanted[n]).abs().max() < 0.01 * wanted[n].abs().max()
    ]


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    start: int,
    scale: float,
    dout: Tensor,
    dlse: Tensor,
) -> dict[str, Any]:
    """Return the gradients in float64 for queries from `start` on. lse and dlse are base 2."""
    leaves = [x.double().requires_grad_() for x in (q, k, v, sinks)]
    q, k, v, sinks = leaves
    scores = scale * q @ k.repeat_interleave(2, 1).mT
    seen = (start + torch.arange(q.shape[2]))[:, None] >= torch.arange(k.shape[2])
    scores = scores.masked_fill(~seen, -math.inf)
    joined = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    lse = joined.logsumexp(-1)
    out = (joined - lse[..., None]).exp()[..., :-1] @ v.repeat_interleave(2, 1)
    of = torch.autograd.grad([out, lse], leaves, [dout.double(), dlse.double() / math.log(2)])
    found = dict(zip(("dq", "dk", "dv", "dsinks"), of, strict=True))
    return found | {"out": out.detach(), "lse": lse.detach() / math.log(2)}


def test_parts_of_a_pass_that_is_not_there_are_refused() -> None:
    text = SPEC + "passes: [forward]\nbackward_in_parts: true\n"
    with pytest.raises(KgenError, match="`backward_in_parts` needs the backward pass"):
        loads(text, "attended.yaml")


def test_a_file_that_shares_nothing_offers_nothing() -> None:
    whole, parts = (
        single(loads(SPEC + more, "a.yaml")) for more in ("", "backward_in_parts: true\n")
    )
    assert "attended_begin" in parts
    assert "attended_begin" not in whole
    narrow = SPEC.replace("head_dim: 128", "head_dim: 64") + "backward_in_parts: true\n"
    assert "attended_begin" not in single(loads(narrow, "a.yaml"))
