"""Kernels of a `cute_<arch>.py` from object files beside this file, where CuTe DSL would compile them.

The launcher is the emitted file itself, but for the function that it calls for compiled kernels. Needs torch and the
package of CuTe DSL, which loads an object file. What there is none for is compiled, with a warning.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import platform
from collections.abc import Callable, Mapping
from typing import Any

from .folder import NO_COMPILER, Folder, NoMachineCode, may_compile, say_once

TOOL = "nvidia-cutlass-dsl"


def words(constants: Mapping[str, Any]) -> dict[str, Any]:
    """Constants of a kernel as a manifest has them: types by their names."""
    return {name: getattr(value, "__name__", value) for name, value in constants.items()}


class Package(Folder):
    """A folder that `kgen build` made."""

    def load(self, stem: str) -> Any:
        """The emitted file, with machine code for kernels."""
        module = self.emitted(stem)
        module._compiled = functools.cache(functools.partial(self._read, module, module._compiled))
        return module

    def _read(self, module: Any, compiled: Callable[..., Any], *constants: Any) -> Any:
        """What launches the kernels for some constants. Raises RuntimeError where there is no machine code of them, and
        nothing may be compiled."""
        names = inspect.signature(compiled).parameters
        given = words(dict(zip(names, constants, strict=False)))
        here = [
            row
            for row in self.manifest["kernels"]
            if row["target"] == "cute" and row["arch"] in module.ARCHS and row["host"] == platform.machine()
        ]
        row = next((row for row in here if row["constants"] == given), None)
        # The code for the host calls functions of that package.
        made, version = self.manifest["compilers"][TOOL], importlib.metadata.version(TOOL)
        if row is not None and made == version:
            loaded = module.cute.runtime.load_module(str(self.folder / row["file"]))
            return getattr(loaded, row["symbol"])
        if not here:
            why = f"no machine code for {' or '.join(module.ARCHS)} beside {platform.machine()}"
        elif made != version:
            why = f"machine code of {TOOL} {made}, and here is {version}"
        else:
            sizes = ", ".join(f"{name} {word}" for name, word in given.items())
            why = f"no machine code for {sizes}; `--heads` and `--gqa` of `kgen build` name sizes"
        if not may_compile():
            raise NoMachineCode(f"{self.name}: {why}, and {NO_COMPILER} is set")
        say_once(f"{self.name}: {why}: CuTe DSL compiles its kernels")
        return compiled(*constants)
