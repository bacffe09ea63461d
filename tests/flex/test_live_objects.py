"""Live objects whose values stand outside of `__dict__`, and functions that torch or Python has wrapped."""

from __future__ import annotations

import enum
import functools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from kgen.flex import spec


class Kind(enum.IntEnum):
    IMAGE = 7


class Mode(enum.Enum):
    FAR = 9


class Sizes(NamedTuple):
    near: int


class Slots:
    __slots__ = ("width",)
    EXTRA = 2

    def __init__(self, width: int) -> None:
        self.width = width

    @property
    def twice(self) -> int:
        return self.width * 2


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Module()
        self.inner.register_buffer("lengths", torch.tensor([4, 5]))


slots, model, sizes, size, scalar = Slots(3), Model(), Sizes(4), torch.Size([5]), np.int64(6)


def of_slots(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q - k < slots.twice + slots.EXTRA


def of_submodule(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k < model.inner.lengths[b]


def of_numbers(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q - k < Kind.IMAGE.value + Mode.FAR.value + sizes.near + size[0] + scalar


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


@pytest.mark.parametrize(
    ("function", "written"),
    [
        (of_slots, "q_idx - kv_idx < 8"),
        (of_submodule, "kv_idx < lengths[b]"),
        (of_numbers, "q_idx - kv_idx < 31"),
        (torch.compile(causal), "q_idx >= kv_idx"),
        (torch.compiler.disable(causal), "q_idx >= kv_idx"),
        (functools.lru_cache(causal), "q_idx >= kv_idx"),
    ],
)
def test_live_object(function: Any, written: str) -> None:
    assert f"mask_mod: {written}\n" in spec(mask_mod=function, name="live")
