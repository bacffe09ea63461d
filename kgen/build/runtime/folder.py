"""Base of the modules that load the machine code of a package: its folders, its manifest, and
fallbacks.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

SOURCES = "sources"
"""The folder of a package that has the emitted files."""
NO_COMPILER = "KGEN_NO_COMPILER"
"""An environment variable. If it is set, calls without machine code raise, and nothing is
compiled.
"""


class NoMachineCode(RuntimeError):
    """Raised if a package has no machine code for a call, and cannot compile it."""


@dataclass(frozen=True, eq=False)
class Folder:
    """A folder that `kgen build` wrote, imported as the package `name`."""

    name: str
    folder: Path

    @functools.cached_property
    def manifest(self) -> Any:
        """The sources, compilers and kernels of the package."""
        return json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))

    def hint_of(self, arch: int) -> str:
        """Return the advice for a compute capability without machine code."""
        known = arch in self.manifest["known"]
        return (
            f"`kgen build --arch sm_{arch}` builds it"
            if known
            else f"the version of kgen that built this does not support sm_{arch}"
        )

    def import_launch_functions(self) -> None:
        """Import `_launch.py`, once for all files of the package."""
        present = sys.modules.get(f"{self.name}._launch")
        if present is None or present.__file__ != str(self.folder / SOURCES / "_launch.py"):
            self.emitted("_launch")

    def emitted(
        self, stem: str, name: str | None = None, scope: Mapping[str, Any] | None = None
    ) -> Any:
        """Import an emitted file under its own name or another, with the names of `scope` as
        globals.
        """
        name = f"{self.name}.{name or stem}"
        spec = importlib.util.spec_from_file_location(name, self.folder / SOURCES / f"{stem}.py")
        assert spec is not None
        assert spec.loader is not None
        module: ModuleType = importlib.util.module_from_spec(spec)
        vars(module).update(scope or {})
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module


def may_compile() -> bool:
    """True if kernels without machine code may be compiled."""
    return not os.environ.get(NO_COMPILER)


@functools.cache
def say_once(message: str) -> None:
    """Warn once per message and process."""
    warnings.warn(message, UserWarning, stacklevel=5)
