"""The stock specs travel with kgen, and are found by name wherever one works.

A manifest calls such a spec `builtin:causal_alibi`: where kgen is installed differs from machine to machine. In kgen's
own repository, which has them as its project's, it has their path, as of any other.
"""

from __future__ import annotations

import os
from pathlib import Path

from kgen.render.environment import PACKAGE

# A name is searched for in one folder and then here. A search of several folders would make it
# depend on the current directory.
PREFIX = "builtin:"


def root() -> Path:
    """Their folder: inside an installed wheel, else beside the package in the repository."""
    installed = PACKAGE / "_data" / "specs"
    return installed if installed.is_dir() else PACKAGE.parent / "specs"


def builtin_specs() -> dict[str, Path]:
    """All of them, by name."""
    return {path.stem: path for path in sorted(root().glob("*.yaml"))}


def as_written(spec: Path, directory: Path) -> str | None:
    """What a manifest in a directory calls a stock spec; None for any other."""
    folder, place = os.path.realpath(root()), os.path.realpath(directory)
    above = os.path.dirname(folder)
    if os.path.dirname(os.path.realpath(spec)) != folder or os.path.commonpath([above, place]) == above:
        return None
    return PREFIX + spec.stem


def as_read(written: str) -> Path | None:
    """The stock spec that a manifest names; None where it names another."""
    return root() / f"{written.removeprefix(PREFIX)}.yaml" if written.startswith(PREFIX) else None
