"""Packages of peers, and the reasons why a peer has no time."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


class DoesNotApply(Exception):
    """The peer cannot compute this spec."""


class NotInstalled(Exception):
    """The package of a peer is missing."""


@dataclass(frozen=True)
class Package:
    """A module that a peer imports, and the way to install it."""

    module: str
    install: str

    def load(self, part: str = "") -> Any:
        """Import the module, or a part of it.

        Raise `NotInstalled` if it or a module that it imports is missing.
        """
        try:
            return importlib.import_module(f"{self.module}.{part}".rstrip("."))
        except ModuleNotFoundError as error:
            text = f"not installed: {self.install} (no module `{error.name}`)"
            raise NotInstalled(text) from error


CUDNN = Package("cudnn.ops.norm", "pip install 'nvidia-cudnn-frontend>=1.32'")
CUDNN_FLEX = Package("cudnn.flex_attention", "pip install 'nvidia-cudnn-frontend[cutedsl]>=1.32'")
FLA = Package("fla.ops", "pip install fla-core")
FLASH_ATTENTION_3 = Package(
    "flash_attn_interface", "build FlashAttention-3 from github.com/Dao-AILab/flash-attention"
)
FLASH_ATTENTION_4 = Package("flash_attn.cute", "pip install --pre flash-attn-4")
LIGER = Package("liger_kernel.ops", "pip install liger-kernel")
QUACK = Package("quack.rmsnorm", "pip install quack-kernels")
