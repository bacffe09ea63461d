"""Import of packages that `kgen build` wrote."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from kgen.build.runtime import triton as runtime


def package_of(name: str, folder: Path) -> runtime.Package:
    """Return the package in a folder.

    It is a plain module, so that importing a missing file fails.
    """
    sys.modules[name] = beside = ModuleType(name)
    beside.__path__ = [str(folder)]
    return runtime.Package(name, folder)
