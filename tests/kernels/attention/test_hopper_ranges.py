"""Tighter ranges of keys per consumer on Hopper: every tile that needs the mask applies it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support.interpreters.own_process import interpreted
from support.interpreters.some_cases import emitted

HEAD = "kernel: attention\nname: ranges\ndtype: bf16\ngqa: 1\n"
WINDOW = "q_idx - kv_idx < 127"
LATE = {
    "the length": f"head_dim: 256\nmask_mod: {WINDOW}",
    "a buffer": "head_dim: 128\nbuffers: {n: {shape: [SQ], dtype: int32, sorted: true}}\n"
    f"mask_mod: {WINDOW} and kv_idx < n[q_idx]",
}
"""Masks with a window. The range of keys ends at the length, or at a value that each query
reads.
"""


@pytest.mark.parametrize("end", LATE)
def test_the_last_tiles_are_masked_behind_a_start_that_a_consumer_raises(
    end: str, tmp_path: Path
) -> None:
    path = emitted(HEAD + LATE[end], tmp_path)
    assert "own_full_lo" in path.read_text()
    assert interpreted(_furthest, path, end) < 0.02


def _furthest(path: Path, end: str) -> float:
    """Return the largest error of the output and the gradient of q, relative to the result.

    If keys past the length counted, P would be infinite, because `exp2(-lse)` overflows.
    """
    from kgen.kernels.attention.schedules.hopper.verify import imported
    from kgen.verify import interpreter

    torch.set_num_threads(1)
    interpreter.mend()
    function = imported(path, "ranges").ranges
    sq, sk, dim = (384, 257, 256) if end == "the length" else (384, 640, 128)
    random = torch.Generator().manual_seed(0)
    far = 4 if end == "the length" else 0
    q, k = (x + torch.randn(1, 1, n, dim, generator=random) for x, n in ((far, sq), (-far, sk)))
    v, dout = (torch.randn(1, 1, n, dim, generator=random) for n in (sk, sq))
    q, k, v, dout = (x.bfloat16() for x in (q, k, v, dout))
    n = (
        torch.where(torch.arange(sq) < 310, 191, sk).int()
        if end == "a buffer"
        else torch.tensor([sk] * sq)
    )
    out = function(q.requires_grad_(), k, v, **({"n": n} if end == "a buffer" else {}))
    exact = q.detach().double().requires_grad_()
    queries, keys = torch.arange(sq)[:, None], torch.arange(sk)
    hidden = (queries - keys >= 127) | (keys >= n[:, None])
    scores = (exact @ k.double().mT / math.sqrt(dim)).masked_fill(hidden, -1e30)
    wanted = scores.softmax(3).masked_fill(hidden, 0.0) @ v.double()
    (got,) = torch.autograd.grad(out, q, dout)
    (want,) = torch.autograd.grad(wanted, exact, dout.double())
    pairs = ((out, wanted), (got, want))
    off = [float((a.double() - b).norm() / b.norm()) for a, b in pairs]
    return math.inf if any(map(math.isnan, off)) else max(off)
