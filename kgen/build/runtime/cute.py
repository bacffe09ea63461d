"""Load the kernels of a `cute_<arch>.py` from object files instead of compiling them with CuTe DSL.

The emitted file launches the kernels. This module replaces only its function that returns compiled
kernels. Needs torch and CuTe DSL, which loads object files, and compiles kernels without one, with
a warning.
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
    """Return the constants of a kernel as in a manifest, with types replaced by their names."""
    return {name: getattr(value, "__name__", value) for name, value in constants.items()}


class Package(Folder):
    """A folder that `kgen build` wrote."""

    def load(self, stem: str) -> Any:
        """Import the emitted file, with machine code for its kernels."""
        self.import_launch_functions()
        module = self.emitted(stem)
        module._compiled = functools.cache(functools.partial(self._read, module, module._compiled))
        return module

    def _read(self, module: Any, compiled: Callable[..., Any], *constants: Any) -> Any:
        """Return the function that launches the kernels for these constants.

        Raises RuntimeError if they have no machine code and nothing may be compiled.
        """
        names = inspect.signature(compiled).parameters
        given = words(dict(zip(names, constants, strict=False)))
        here = [
            row
            for row in self.manifest["kernels"]
            if row["target"] == "cute"
            and row["arch"] in module.ARCHS
            and row["host"] == platform.machine()
        ]
        row = next((row for row in here if row["constants"] == given), None)
        # The host code calls functions of CuTe DSL, which differ between versions.
        made, version = self.manifest["compilers"][TOOL], importlib.metadata.version(TOOL)
        if row is not None and made == version:
            loaded = module.cute.runtime.load_module(str(self.folder / row["file"]))
            return getattr(loaded, row["symbol"])
        if not here:
            why = f"no machine code for {' or '.join(module.ARCHS)} on {platform.machine()}"
        elif made != version:
            why = f"machine code of {TOOL} {made}, installed is {version}"
        else:
            sizes = ", ".join(f"{name} {word}" for name, word in given.items())
            why = f"no machine code for {sizes} (`kgen build` has `--heads` and `--gqa`)"
        if not may_compile():
            raise NoMachineCode(f"{self.name}: {why}, and {NO_COMPILER} is set")
        say_once(f"{self.name}: {why}. CuTe DSL compiles its kernels")
        return compiled(*constants)
