"""A stand-in for torchtitan, with the names that emitted modules use.

The signatures are those of torchtitan 0.3. `VarlenAttention` computes nothing.
"""

from __future__ import annotations

from pathlib import Path

MODULE = """
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn


class Module(nn.Module):
    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[Any] = None

        def build(self) -> Any:
            return self._owner(config=self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Config" in cls.__dict__:
            assert "__slots__" in cls.Config.__dict__
            cls.Config._owner = cls
"""
ATTENTION = """
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan.protocols.module import Module


class VarlenMetadata(NamedTuple):
    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int
    cu_seq_q_host: tuple[int, ...] | None = None


def create_varlen_metadata_for_document(positions: Tensor) -> VarlenMetadata:
    starts = (positions.flatten() == 0).nonzero().flatten().tolist()
    offsets = torch.tensor([*starts, positions.numel()], dtype=torch.int32)
    longest = int(offsets.diff().max())
    return VarlenMetadata(offsets, offsets, longest, longest)


class VarlenAttention(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        window_size: tuple[int, int] = (-1, 0)

    def __init__(self, config: Config) -> None:
        raise RuntimeError("needs a GPU")
"""


def stand_in(folder: Path) -> None:
    """Write a package `torchtitan` into a folder."""
    for name, text in (("protocols/module", MODULE), ("models/common/attention", ATTENTION)):
        path = folder / "torchtitan" / f"{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
