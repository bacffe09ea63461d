"""Live objects whose values stand outside of `__dict__`, and functions that torch or Python has
wrapped.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from kgen.diagnostics import KgenError
from kgen.flex import spec


class Kind(enum.IntEnum):
    IMAGE = 7


class Mode(enum.Enum):
    FAR = 9


class Sizes(NamedTuple):
    near: int


class Sizes2:
    WIDTH = 11
    LENGTHS = torch.tensor([3, 4])


@dataclasses.dataclass(frozen=True)
class Config:
    window: int = 5
    kind: Kind = Kind.IMAGE


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
        self.layers = torch.nn.ModuleList([torch.nn.Module() for _ in range(2)])
        self.layers[1].bias = torch.nn.Parameter(torch.zeros(4))
        self.scales = torch.nn.ParameterDict({"near": torch.nn.Parameter(torch.zeros(4))})
        self.both = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(4)) for _ in range(2)])
        self.named = torch.nn.ModuleDict({"far": self.layers[1]})


slots, model, sizes, size, scalar = Slots(3), Model(), Sizes(4), torch.Size([5]), np.int64(6)
config, narrow = Config(), np.uint8(200)


def of_slots(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q - k < slots.twice + slots.EXTRA


def of_submodule(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k < model.inner.lengths[b]


def of_numbers(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q - k < Kind.IMAGE.value + Mode.FAR.value + sizes.near + size[0] + scalar


def of_class(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k < Sizes2.WIDTH) & (k < Sizes2.LENGTHS[b])


def of_dataclass(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q - k < config.window + config.kind


def of_a_list(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + model.layers[1].bias[h]


def of_a_dictionary(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * model.scales["near"][h]


def of_parameters(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * model.both[0][h] + model.both[-1][h] + model.named["far"].bias[h]


def of_loops(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    for p in model.both:
        s = s + p[h]
    return s


def of_narrow(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q - k < narrow + 100


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


@pytest.mark.parametrize(
    ("function", "written"),
    [
        (of_slots, "q_idx - kv_idx < 8"),
        (of_submodule, "kv_idx < lengths[b]"),
        (of_numbers, "q_idx - kv_idx < 31"),
        (of_class, "q_idx - kv_idx < 11 and kv_idx < LENGTHS[b]"),
        (of_dataclass, "q_idx - kv_idx < 12"),
        (torch.compile(causal), "q_idx >= kv_idx"),
        (torch.compiler.disable(causal), "q_idx >= kv_idx"),
        (functools.lru_cache(causal), "q_idx >= kv_idx"),
    ],
)
def test_live_object(function: Any, written: str) -> None:
    assert f"mask_mod: {written}\n" in spec(mask_mod=function, name="live")


@pytest.mark.parametrize(
    ("function", "written"),
    [
        (of_a_list, "score + bias[h]"),
        (of_a_dictionary, "score * near[h]"),
        (of_parameters, "score * both_0[h] + both_1[h] + bias[h]"),
        (of_loops, "score + both_0[h] + both_1[h]"),
    ],
)
def test_parameters_in_containers(function: Any, written: str) -> None:
    text = spec(score_mod=function, name="live")
    assert f"score_mod: {written}\n" in text
    assert text.count("dtype: any, grad: true") == written.count("[h]")


def test_arithmetic_of_numpy_is_refused() -> None:
    with pytest.raises(KgenError, match="wrap around"):
        spec(mask_mod=of_narrow, name="live")
