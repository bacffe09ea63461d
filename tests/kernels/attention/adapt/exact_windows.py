"""Attention in the arguments of FlashAttention, in float64, and the examples of its page."""

from __future__ import annotations

import importlib
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kgen.render.adapters import Adapter
from kgen.spec.load import Loaded, loads_variants

PAGE = Path(__file__).parents[4] / "docs" / "adapters.md"


def run_example(section: str, folder: Path) -> None:
    """Run the first command and the script of a section of the page, in an empty folder."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2]
    command, script = (
        re.search(r"`kgen (.*?)`", text),
        re.search(r"```python\n(.*?)```", text, re.DOTALL),
    )
    assert command is not None
    assert script is not None
    (folder / "example.py").write_text(script[1])
    adapt = ["-m", "kgen", *shlex.split(command[1]), "--no-prove"]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    for arguments in (adapt, ["example.py"]):
        run = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert run.returncode == 0, run.stderr


def spec(name: str, mods: str = "", dtype: str = "fp16") -> str:
    return f"kernel: attention\nname: {name}\ndtype: {dtype}\nhead_dim: 16\n{mods}\n"


def loaded(*texts: str) -> list[list[Loaded]]:
    return [loads_variants(text, "own.yaml") for text in texts]


def written(made: Adapter, folder: Path) -> None:
    for inner, files in made.folders.items():
        (folder / inner).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / inner / name).write_text(content)


def imported(folder: Path, name: str) -> ModuleType:
    """Import a package, so that its kernels run in this process."""
    from kgen.verify import interpreter

    torch.set_num_threads(1)
    interpreter.mend()
    sys.path.insert(0, str(folder))
    return importlib.import_module(name)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Sequence[int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out and the natural log-sum-exp of [B, H, S, D] tensors.

    The last query has the position of the last key. Negative numbers of `window` are no bounds.
    """
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    sq, sk = scores.shape[-2:]
    after = torch.arange(sk) - (torch.arange(sq)[:, None] + sk - sq)
    if slopes is not None:
        scores = scores - slopes.double()[..., None, None] * after.abs()
    left, right = (math.inf if n < 0 else n for n in window)
    seen = (after >= -left) & (after <= right)
    scores = scores.masked_fill(~seen, -math.inf)
    weights = torch.where(seen.any(-1, keepdim=True), scores, 0.0).softmax(-1)
    out = (weights * seen) @ v
    return out, scores.logsumexp(-1)


def packed_reference(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[tuple[int, int]], **options: Any
) -> tuple[Tensor, Tensor]:
    """Return out [T, H, D] and lse [H, T] of packed sequences with these numbers of tokens."""
    parts, at_q, at_k = [], 0, 0
    for n_q, n_k in lengths:
        one = (q[at_q : at_q + n_q], k[at_k : at_k + n_k], v[at_k : at_k + n_k])
        parts.append(reference(*(x.transpose(0, 1)[None] for x in one), **options))
        at_q, at_k = at_q + n_q, at_k + n_k
    out = torch.cat([out[0].transpose(0, 1) for out, _ in parts])
    return out, torch.cat([lse[0] for _, lse in parts], -1)


def offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def gradients(
    call: Callable[..., Tensor], tensors: Sequence[Tensor], dout: Tensor
) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = call(*leaves)
    return torch.autograd.grad(out, leaves, dout.to(out.dtype))


def apart(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Return the largest difference, relative to the largest element of each tensor."""
    worst = 0.0
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape, f"got {list(a.shape)}, expected {list(b.shape)}"
        hidden = b == -math.inf
        assert torch.equal(a == -math.inf, hidden)
        a, b = a.double().masked_fill(hidden, 0.0), b.masked_fill(hidden, 0.0)
        worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)))
    return worst
