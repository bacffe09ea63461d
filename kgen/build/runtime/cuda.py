"""Load the kernels of a `cuda.py` from machine code instead of compiling them with NVRTC. Needs
torch and cuda.core.

The emitted file launches the kernels. This module replaces only its function that returns a
kernel's machine code. A kernel without machine code is compiled by NVRTC, with a warning, if NVRTC
is installed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from cuda.core import ObjectCode

from .folder import NO_COMPILER, Folder, NoMachineCode, may_compile, say_once


class Package(Folder):
    """A folder that `kgen build` wrote."""

    def load(self, stem: str) -> Any:
        """Import the emitted file, with machine code for its kernels."""
        self.import_launch_functions()
        module = self.emitted(stem)
        rows = {
            (row["kernel"], row["capability"]): row
            for row in self.manifest["kernels"]
            if row["target"] == "cuda"
        }
        module._compiled = functools.cache(functools.partial(self._read, rows, module._compiled))
        return module

    def _read(
        self,
        rows: Mapping[Any, Any],
        compiled: Callable[[str, str], ObjectCode],
        kernel: str,
        arch: str,
    ) -> ObjectCode:
        """Return the machine code of a kernel for an architecture, from a file or from NVRTC.

        Raises RuntimeError if there is no file and NVRTC fails, or may not be used.
        """
        chip = int(arch.removeprefix("sm_"))
        row = rows.get((kernel, chip))
        if row is not None:
            return ObjectCode.from_cubin(
                (self.folder / row["file"]).read_bytes(),
                symbol_mapping={kernel: row["symbol"].encode()},
            )
        why = f"{self.name}: no machine code of {kernel} for {arch}"
        hint = self.hint_of(chip)
        if not may_compile():
            raise NoMachineCode(f"{why}, and {NO_COMPILER} is set: {hint}")
        try:
            found = compiled(kernel, arch)
        except Exception as error:
            raise RuntimeError(f"{why}, and NVRTC cannot compile it: {hint}") from error
        say_once(
            f"{self.name}: no machine code of its CUDA kernels for {arch}. NVRTC compiles them; "
            f"{hint}"
        )
        return found
