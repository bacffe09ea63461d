"""The file `generated/<name>/manifest.json`, which records the spec of a directory and its files.

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
    """The content of a manifest. `spec` is a POSIX path relative to the directory, or the name of a
    stock spec.

    `kgen` is the version that wrote the manifest, for people. A manifest that differs only in it
    counts as unchanged.
    """

    spec: str
    files: Mapping[str, str]
    kgen: str = __version__
    proved: bool = True
    """False if the files were written without a proof (`--no-prove`)."""

    def text(self) -> str:
        """Return the text of the file, which is the same on every machine."""
        version = {"kgen": self.kgen} if self.kgen else {}
        unproved = {} if self.proved else {"proved": False}
        said = {**version, "spec": self.spec, **unproved, "files": dict(sorted(self.files.items()))}
        return json.dumps(said, indent=2) + "\n"

    def spec_path(self, directory: Path) -> Path:
        """Return the path of the spec, which need not exist."""
        return Path(os.path.realpath(builtin.as_read(self.spec) or directory / self.spec))


def relative_spec(spec: Path, directory: Path) -> str:
    """Return the path of a spec as it is in the manifest of `directory`."""
    if stock := builtin.as_written(spec, directory):
        return stock
    return Path(os.path.relpath(os.path.realpath(spec), os.path.realpath(directory))).as_posix()


def read(directory: Path) -> Manifest | None:
    """Return the manifest of a directory; None if it is missing or unreadable, for example with
    conflict marks.

    Raises `KgenError` for content that neither kgen nor a merge writes: deeply nested brackets, an
    impossible path.
    """
    path = directory / MANIFEST
    hint = f"remove {path}; kgen recognizes its files by their headers"
    try:
        data = read_json(path, "bad-manifest", hint)
        files = {str(name): str(value) for name, value in data["files"].items()}
        spec = str(data["spec"])
    except (OSError, NotJsonError, KeyError, TypeError, AttributeError):
        return None
    for name in (spec, *files):
        if not _is_path(name):
            message = f"{shown(name)} is not a file name"
            raise KgenError(Diagnostic("bad-manifest", message, str(path), 1, 1, hint=hint))
    return Manifest(spec, files, str(data.get("kgen", "")), data.get("proved") is not False)


def _is_path(name: str) -> bool:
    """True if a file can have this name."""
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False


def listed(directory: Path) -> list[str]:
    """Return the files that kgen wrote to a directory, from its manifest, or else from their
    headers.
    """
    manifest = read(directory)
    if manifest is not None:
        # Anyone may have written the manifest: a name in it must not lead out of its directory.
        return sorted(name for name in manifest.files if Path(name).name == name)
    if not directory.is_dir():
        return []
    return sorted(entry.name for entry in directory.iterdir() if _is_ours(entry))


def _is_ours(path: Path) -> bool:
    # A leading dot marks a temporary file of another process.
    if path.name.startswith(".") or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            start = file.read(4096).decode("utf-8", "replace")
    except FileNotFoundError:  # another process has deleted it
        return False
    return body_hash(start.replace("\r\n", "\n")) is not None
