"""Packages that `kgen build` made, imported as Python finds them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from kgen.build.runtime import triton as runtime


def package_of(name: str, folder: Path) -> runtime.Package:
    """The package in a folder. A plain module stands for it, so that a file that is not there cannot be imported."""
    sys.modules[name] = beside = ModuleType(name)
    beside.__path__ = [str(folder)]
    return runtime.Package(name, folder)
