"""What those share that load machine code of a package: its places, what it says of itself, whether it may compile."""

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
"""Where the environment has it, what there is no machine code for raises: nothing is compiled."""


class NoMachineCode(RuntimeError):
    """A package has no machine code for a call, and may not or cannot compile any."""


@dataclass(frozen=True, eq=False)
class Folder:
    """A folder that `kgen build` made, as a package of that name."""

    name: str
    folder: Path

    @functools.cached_property
    def manifest(self) -> Any:
        """What was compiled, and from what."""
        return json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))

    def hint_of(self, arch: int) -> str:
        """What to do for a chip that there is no machine code for."""
        known = arch in self.manifest["known"]
        return (
            f"`kgen build --arch sm_{arch}` makes it"
            if known
            else "the `kgen build` that made this knows no such chip"
        )

    def emitted(self, stem: str, name: str | None = None, scope: Mapping[str, Any] | None = None) -> Any:
        """An emitted file, imported under its own name or another, with some names in its scope."""
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
    """Whether a compiler may be asked for what there is no machine code for."""
    return not os.environ.get(NO_COMPILER)


@functools.cache
def say_once(message: str) -> None:
    """Warn, the first time."""
    warnings.warn(message, UserWarning, stacklevel=5)
