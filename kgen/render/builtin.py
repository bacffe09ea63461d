"""Stock specs, which kgen ships and finds by name.

A manifest names such a spec `builtin:causal_alibi`, because the path of the installation differs
between machines. In kgen's own repository the manifest has the path, as for any other spec.
"""

from __future__ import annotations

import os
from pathlib import Path

from kgen.render.environment import PACKAGE

# A name is searched for in one folder and then here. A search of several folders would make it
# depend on the current directory.
PREFIX = "builtin:"


def root() -> Path:
    """Return the folder of stock specs: inside an installed wheel, else next to the package in the
    repository.
    """
    installed = PACKAGE / "_data" / "specs"
    return installed if installed.is_dir() else PACKAGE.parent / "specs"


def builtin_specs() -> dict[str, Path]:
    """Return the paths of all stock specs, by name."""
    return {path.stem: path for path in sorted(root().glob("*.yaml"))}


def as_written(spec: Path, directory: Path) -> str | None:
    """Return the name of a stock spec in a manifest of `directory`; None for any other spec."""
    folder, place = os.path.realpath(root()), os.path.realpath(directory)
    above = os.path.dirname(folder)
    if (
        os.path.dirname(os.path.realpath(spec)) != folder
        or os.path.commonpath([above, place]) == above
    ):
        return None
    return PREFIX + spec.stem


def as_read(written: str) -> Path | None:
    """Return the path of the stock spec that a manifest names; None if it names another spec."""
    return root() / f"{written.removeprefix(PREFIX)}.yaml" if written.startswith(PREFIX) else None
