"""Kernels of a `cuda.py` from machine code beside this file, where NVRTC would compile them. Needs torch, cuda.core.

The launcher is the emitted file itself, but for the function that it calls for a kernel's machine code. What there is
none for goes to NVRTC, if it is there, with a warning.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from cuda.core import ObjectCode

SOURCES = "sources"
NO_COMPILER = "KGEN_NO_COMPILER"
"""Where the environment has it, what there is no machine code for raises: nothing is compiled."""


@dataclass(frozen=True)
class Package:
    """A folder that `kgen build` made, as a package of that name."""

    name: str
    folder: Path

    def load(self, stem: str) -> ModuleType:
        """The emitted file, with machine code for kernels."""
        path = self.folder / SOURCES / f"{stem}.py"
        spec = importlib.util.spec_from_file_location(f"{self.name}.{stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module
        spec.loader.exec_module(module)
        manifest = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
        rows = {
            (row["kernel"], row["capability"]): row for row in manifest["kernels"] if row["target"] == "cuda"
        }
        module._compiled = functools.cache(functools.partial(self._read, rows, module._compiled))
        found: ModuleType = module
        return found

    def _read(
        self, rows: Mapping[Any, Any], compiled: Callable[[str, str], ObjectCode], kernel: str, arch: str
    ) -> ObjectCode:
        """What NVRTC makes of a kernel for an architecture. Raises RuntimeError where it is not there and NVRTC
        neither."""
        row = rows.get((kernel, int(arch.removeprefix("sm_"))))
        if row is not None:
            return ObjectCode.from_cubin(
                (self.folder / row["file"]).read_bytes(), symbol_mapping={kernel: row["symbol"].encode()}
            )
        why = f"{self.name}: no machine code of {kernel} for {arch}"
        hint = f"`kgen build --arch {arch}` makes it"
        if os.environ.get(NO_COMPILER):
            raise RuntimeError(f"{why}, and {NO_COMPILER} is set: {hint}")
        try:
            found = compiled(kernel, arch)
        except Exception as error:
            raise RuntimeError(f"{why}, and NVRTC makes none: {hint}") from error
        _say_once(
            f"{self.name}: no machine code of its kernels in CUDA for {arch}: NVRTC compiles them; {hint}"
        )
        return found


@functools.cache
def _say_once(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=2)
