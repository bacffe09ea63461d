"""Values of FlexAttention functions, run for one pair at a time, and values of the expressions of a
spec.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from kgen.spec.load import Loaded
from kgen.verify.evaluate import evaluate

SIZES = {"B": 2, "HQ": 4, "HKV": 4, "SQ": 64, "SK": 64}
PAIRS = 120


def pairs() -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(1)

    def draw(n: int) -> torch.Tensor:
        return torch.randint(0, n, (PAIRS,), generator=make)

    score = torch.randn(PAIRS, generator=make, dtype=torch.float64) * 3
    return {"score": score, "b": draw(2), "h": draw(4), "q_idx": draw(64), "kv_idx": draw(64)}


def expected(function: Any, field: str) -> torch.Tensor:
    """Call the function for one pair at a time, as FlexAttention does."""
    names = ("score", "b", "h", "q_idx", "kv_idx")[field == "mask_mod" :]
    values = pairs()
    with torch.no_grad():
        found = [torch.as_tensor(function(*(values[n][i] for n in names))) for i in range(PAIRS)]
    return torch.stack(found)


def got(loaded: Loaded, field: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    if field not in loaded.trees:
        return pairs()["score"] if field == "score_mod" else torch.ones(PAIRS, dtype=torch.bool)
    env = {**SIZES, **pairs(), "inf": torch.inf}
    for name in loaded.spec.buffers:
        env[name] = tensors[name].detach()
    return evaluate(loaded.trees[field], env, torch).expand(PAIRS)


def captured(function: Any) -> dict[str, torch.Tensor]:
    """Return by name the tensors that a function captured, directly or through captured
    functions.
    """
    found: dict[str, torch.Tensor] = {}
    waiting, seen = [function], set()
    while waiting:
        one = waiting.pop()
        if isinstance(one, functools.partial):
            waiting.append(one.func)
        elif isinstance(one, tuple):
            waiting += one
        elif inspect.isfunction(one) and id(one) not in seen:
            seen.add(id(one))
            inside = inspect.getclosurevars(one).nonlocals
            found |= {n: v for n, v in inside.items() if isinstance(v, torch.Tensor)}
            waiting += inside.values()
    return found


def same(value: torch.Tensor, want: torch.Tensor, bound: float = 1e-9) -> None:
    # The smallest finite number is a spelling of minus infinity.
    value, want = (
        torch.where(x == torch.finfo(torch.float32).min, -torch.inf, x.to(torch.float64))
        for x in (value, want)
    )
    torch.testing.assert_close(value, want, rtol=bound, atol=bound)
