"""Kernels of a `cuda.py` from machine code beside this file, where NVRTC would compile them. Needs torch, cuda.core.

The launcher is the emitted file itself, but for the function that it calls for a kernel's machine code. What there is
none for goes to NVRTC, if it is there, with a warning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from cuda.core import ObjectCode

from .folder import NO_COMPILER, Folder, NoMachineCode, may_compile, say_once


class Package(Folder):
    """A folder that `kgen build` made."""

    def load(self, stem: str) -> Any:
        """The emitted file, with machine code for kernels."""
        module = self.emitted(stem)
        rows = {
            (row["kernel"], row["capability"]): row
            for row in self.manifest["kernels"]
            if row["target"] == "cuda"
        }
        module._compiled = functools.cache(functools.partial(self._read, rows, module._compiled))
        return module

    def _read(
        self, rows: Mapping[Any, Any], compiled: Callable[[str, str], ObjectCode], kernel: str, arch: str
    ) -> ObjectCode:
        """What NVRTC makes of a kernel for an architecture. Raises RuntimeError where it is not there and NVRTC
        neither."""
        chip = int(arch.removeprefix("sm_"))
        row = rows.get((kernel, chip))
        if row is not None:
            return ObjectCode.from_cubin(
                (self.folder / row["file"]).read_bytes(), symbol_mapping={kernel: row["symbol"].encode()}
            )
        why = f"{self.name}: no machine code of {kernel} for {arch}"
        hint = self.hint_of(chip)
        if not may_compile():
            raise NoMachineCode(f"{why}, and {NO_COMPILER} is set: {hint}")
        try:
            found = compiled(kernel, arch)
        except Exception as error:
            raise RuntimeError(f"{why}, and NVRTC makes none: {hint}") from error
        say_once(
            f"{self.name}: no machine code of its kernels in CUDA for {arch}: NVRTC compiles them; {hint}"
        )
        return found
