"""Comparison of the reference with FlexAttention, in eager mode and float64.

It runs the code that `kgen explain --flex` prints. This code and the reference share the trees of
the expressions, but no evaluator.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from kgen.flex.flexcode import flex_code
from kgen.kernels.attention.verify.inputs import Case, draw
from kgen.kernels.attention.verify.reference import Call, attention
from kgen.spec.load import Loaded

BOUND = 1e-6
"""Largest relative difference. The printed code itself converts some numbers to float32 with
`.float()`.
"""


class _ZeroOutside:
    """A buffer that reads as zero out of bounds."""

    def __init__(self, values: Tensor) -> None:
        self.values = values.double() if values.dtype.is_floating_point else values

    def __getitem__(self, at: Any) -> Tensor:
        indices = [torch.as_tensor(i) for i in (at if isinstance(at, tuple) else (at,))]
        pairs = [*zip(indices, self.values.shape, strict=True)]
        inside = torch.stack(torch.broadcast_tensors(*((i >= 0) & (i < n) for i, n in pairs))).all(
            0
        )
        value = self.values[tuple(i.clamp(0, n - 1) for i, n in pairs)]
        return torch.where(inside, value, torch.zeros_like(value))


def says_it(problem: Any) -> bool:
    """True if FlexAttention can express the whole spec."""
    return not (problem.sinks or problem.varlen or problem.page_size)


def difference(loaded: Loaded, problem: Any, case: Case) -> float:
    """Return the largest difference between the outputs of the reference and FlexAttention,
    relative to the largest output.
    """
    inputs = draw(problem, case, "cpu")
    q, k, v = (x.double().nan_to_num(0.0) for x in (inputs.q, inputs.clean_k, inputs.clean_v))
    outside = {name: _ZeroOutside(x) for name, x in {**inputs.buffers, **inputs.cache}.items()}
    scope: dict[str, Any] = {**outside, **inputs.params, **case.sizes, "q": q, "k": k, "v": v}
    plain = flex_attention.flex_attention
    with (
        warnings.catch_warnings(),
        _default_dtype(torch.float64),
        mock.patch.object(flex_attention, "flex_attention", partial(plain, scale=case.scale)),
    ):
        warnings.simplefilter("ignore")
        exec(flex_code(loaded), scope)
    wanted = attention(
        q,
        k,
        v,
        Call(
            score_mod=problem.score_mod,
            mask_mod=problem.mask_mod,
            buffers={
                n: x.double() if x.dtype.is_floating_point else x for n, x in inputs.buffers.items()
            },
            params=inputs.params,
            scale=case.scale,
            kv_lens=inputs.cache.get("kv_lens"),
            aligned_to_end=problem.aligned_to_end,
        ),
    )
    error = (scope["out"] - wanted.out).abs().nan_to_num(torch.inf).max()
    return float(error / wanted.out.abs().max().clamp(min=1e-30))


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
