"""Values of one buffer or run-time parameter of a case."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from kgen.kernels.attention.spec import ANY
from kgen.kernels.attention.verify.case import Case
from kgen.kernels.attention.verify.problem import Buffer
from kgen.verify.tensors import DTYPES

INT_EDGES = (34, 1, 100_000, 0)
FLOAT_EDGES = (1.0, 0.125, 50.0)
EDGES = max(len(INT_EDGES), len(FLOAT_EDGES))
"""Number of cases that differ only in run-time parameters."""


def edge(type_: str, case: Case) -> int | float:
    edges: tuple[int | float, ...] = INT_EDGES if type_ == "int" else FLOAT_EDGES
    return edges[case.edge % len(edges)]


def drawn(
    buffer: Buffer, case: Case, random: Any, compared: tuple[int, ...], plain: bool = False
) -> Tensor:
    """Return plausible values for a buffer, in its own dtype.

    Integers include values around the constants that they are `compared` with. Heads of a `plain`
    buffer are equal.
    """
    longest = max(case.sq, case.sk)
    # With an open extent, some indices are out of range.
    sizes = case.sizes | {ANY: longest // 2 + 2 if case.any_size is None else case.any_size}
    shape = tuple(n if isinstance(n, int) else sizes[n] for n in buffer.shape)
    per_token = buffer.per_token
    dtype = DTYPES[_dtype(buffer, case)]
    wide = dtype == torch.int64 and case.ints == "wide"
    if dtype.is_floating_point:
        values = torch.randn(shape, generator=random) * (1.0 if per_token else 0.1)
        if not per_token and not plain:
            values *= case.magnitude
        if shape and not per_token and not plain:
            values[..., ::2] /= 20  # in some heads, distant keys contribute
        return (values.sort(-1).values if buffer.sorted else values).to(dtype)
    if buffer.sorted and per_token:
        if case.ints == "runs":
            return (torch.arange(shape[-1]) // 270).expand(shape).to(dtype)
        # Document ids 0 0 0 1 1 2 2 2 2 ..., including documents of one token.
        documents = (
            (torch.rand(shape, generator=random) < 4 / max(1, shape[-1])).cumsum(-1).to(dtype)
        )
        return (documents - 1) * 2**32 + 5 if wide else documents
    if dtype == torch.uint8:
        low, high = {"zero": (0, 1), "past": (255, 256)}.get(case.ints, (0, 256))
        return torch.randint(low, high, shape, generator=random, dtype=dtype)
    if dtype == torch.bool:
        chance = {"mixed": 0.6, "runs": 0.3, "wide": 0.6, "zero": 0.0, "past": 1.0}[case.ints]
        found = torch.rand(shape, generator=random) < chance
        if case.unread and not per_token:
            # one head or sequence has no visible key
            found.view(-1)[0], found.view(-1)[-1] = True, False
        return found
    choice = torch.tensor(sorted({*range(4 if per_token else longest + 9), *compared}))
    values = choice[torch.randint(0, len(choice), shape, generator=random)]
    if not per_token and values.numel() > 1:
        values.view(-1)[0], values.view(-1)[-1] = longest // 2 + 1, 0
    if wide:
        high = torch.randint(-1, 2, shape, generator=random)
        # For lengths: one past the end, one small, one below zero.
        values += 2**32 * (high if per_token else (1 - torch.arange(high.numel()) % 3).view(shape))
    if buffer.sorted:
        values = values.sort(-1).values
    elif case.ints == "runs" and per_token:
        values = ((torch.arange(shape[-1]) + values.view(-1)[0]) // 150 % 3).expand(shape)
    elif case.ints in ("zero", "past"):
        values = torch.full_like(values, {"zero": 0, "past": longest + 5}[case.ints])
    return (values if buffer.within is None else values.clamp(-buffer.within, buffer.within)).to(
        dtype
    )


def _dtype(buffer: Buffer, case: Case) -> str:
    """Return the dtype of a case's tensor.

    An open dtype varies between cases and between buffers.
    """
    return buffer.dtypes[zlib.crc32(f"{case.name} {buffer.name}".encode()) % len(buffer.dtypes)]
