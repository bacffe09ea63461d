"""`generated/<name>/manifest.json`: which spec made the directory, and which files.

There is one manifest per directory, so that processes that render different specs share no file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kgen import __version__
from kgen.diagnostics import Diagnostic, KgenError, shown
from kgen.files import NotJsonError, read_json
from kgen.render import builtin
from kgen.render.header import body_hash

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What a directory's manifest says. `spec` is a posix path relative to the directory, or a stock spec's name.

    `kgen` is the version that wrote it, for people: nothing depends on it, and another version, or none, is no change.
    """

    spec: str
    files: Mapping[str, str]
    kgen: str = __version__
    proved: bool = True
    """False where the files were written without the proof that comes before (`--no-prove`)."""

    def text(self) -> str:
        """The file, the same on every machine."""
        version = {"kgen": self.kgen} if self.kgen else {}
        unproved = {} if self.proved else {"proved": False}
        said = {**version, "spec": self.spec, **unproved, "files": dict(sorted(self.files.items()))}
        return json.dumps(said, indent=2) + "\n"

    def spec_path(self, directory: Path) -> Path:
        """Where the spec should be."""
        return Path(os.path.realpath(builtin.as_read(self.spec) or directory / self.spec))


def relative_spec(spec: Path, directory: Path) -> str:
    """The path of a spec as the manifest in `directory` writes it."""
    if stock := builtin.as_written(spec, directory):
        return stock
    return Path(os.path.relpath(os.path.realpath(spec), os.path.realpath(directory))).as_posix()


def read(directory: Path) -> Manifest | None:
    """The manifest of a directory; None without one that can be read (a merge may have left marks in it).

    Raises `KgenError` for what neither kgen nor a merge writes: no end of brackets, a path that no system has.
    """
    path = directory / MANIFEST
    hint = f"remove {path}: the files themselves say what is kgen's"
    try:
        data = read_json(path, "bad-manifest", hint)
        files = {str(name): str(value) for name, value in data["files"].items()}
        spec = str(data["spec"])
    except (OSError, NotJsonError, KeyError, TypeError, AttributeError):
        return None
    for name in (spec, *files):
        if not _is_path(name):
            message = f"{shown(name)} is not the name of a file"
            raise KgenError(Diagnostic("bad-manifest", message, str(path), 1, 1, hint=hint))
    return Manifest(spec, files, str(data.get("kgen", "")), data.get("proved") is not False)


def _is_path(name: str) -> bool:
    """Whether a system may have a file of this name."""
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False


def listed(directory: Path) -> list[str]:
    """The files that kgen put into a directory: by its manifest, or without one by their own headers."""
    manifest = read(directory)
    if manifest is not None:
        # A manifest is only text on disk: a name in it must not lead out of its directory.
        return sorted(name for name in manifest.files if Path(name).name == name)
    if not directory.is_dir():
        return []
    return sorted(entry.name for entry in directory.iterdir() if _is_ours(entry))


def _is_ours(path: Path) -> bool:
    # A name with a dot in front is what another process is writing just now.
    if path.name.startswith(".") or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            start = file.read(4096).decode("utf-8", "replace")
    except FileNotFoundError:  # Another process has just pruned it.
        return False
    return body_hash(start.replace("\r\n", "\n")) is not None
