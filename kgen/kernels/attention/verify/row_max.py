"""The largest scores that calls with `return_max` return, for specs with `row_max`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kgen.kernels.attention.verify import serving
from kgen.kernels.attention.verify.inputs import Inputs, call
from kgen.kernels.attention.verify.problem import Problem
from kgen.kernels.attention.verify.reference import Result
from kgen.kernels.attention.verify.serving import Served
from kgen.verify import compare

NAMES = ("row_max", "head_max")
"""The outputs: the largest score of each row, and of each query head."""


def of_heads(row_max: Tensor) -> Tensor:
    """Return the largest number of each head, from [B, HQ, SQ] or [HQ, TQ]."""
    rows = row_max.movedim(-2, 0).flatten(1)
    return rows.amax(1) if rows.numel() else rows.new_full((len(rows),), -torch.inf)


def results(problem: Problem, function: Any, inputs: Inputs) -> dict[str, Tensor]:
    """Return the largest scores of rows and of heads, from two calls of the emitted function."""
    if not problem.row_max:
        return {}
    _, rows = call(function, inputs, return_max=True)
    _, _, heads = call(function, inputs, return_lse=True, return_max="head")
    learned = [x for x in (rows, heads) if x.requires_grad]
    assert not learned, "the largest scores have no gradient"
    return dict(zip(NAMES, (rows, heads), strict=True))


def served(names: Mapping[str, Any], problem: Problem, batch: Served) -> dict[str, Tensor]:
    """Return the largest scores of rows and of heads, from two calls of the function for serving.

    Rows after the last sequence must keep their values.
    """
    if not problem.row_max:
        return {}
    own = torch.full_like(batch.lse, 7.0)
    asked = {"row_max": own} if batch.batch.given else {"return_max": True}
    *_, rows = serving.call(names, problem, batch, **asked)
    if batch.batch.given:
        assert rows is own, "the result is the tensor of the call"
        assert bool((own[:, batch.new :] == 7.0).all()), "rows after the end"
    *_, heads = serving.call(names, problem, batch, return_max="head")
    return dict(zip(NAMES, (rows[:, : batch.new].clone(), heads), strict=True))


def verdict(
    name: str, value: Tensor, truth: Result, yardstick: Result, limit: compare.Tolerance
) -> compare.Check:
    """Return the verdict on one of the outputs. One entry is one row.

    A row without keys, or a head without rows, must have -inf.
    """
    want, eager = truth.row_max, yardstick.row_max
    if name == "head_max":
        want, eager = of_heads(want), of_heads(eager)
    traits = compare.Traits(natural=torch.ones_like(want), dtype=torch.float32)
    return compare.check(name, value[..., None], want[..., None], eager[..., None], limit, traits)
