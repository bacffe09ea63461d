"""Packing of a task and its files as bytes, and unpacking on a machine without these files."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import kgen
from kgen.verify.farm.tasks import Task

PACKAGE = Path(kgen.__file__).resolve().parent


@dataclass(frozen=True)
class Packed:
    """A pickled task, and the files of its folders by relative name.

    `digest` is the digest of all of it, `package` the digest of the kgen that packed it. `code` has
    folders next to that package from which the task imports.
    """

    task: bytes
    folders: tuple[dict[str, bytes], ...]
    digest: str
    package: str
    code: tuple[str, ...] = ()


class Refused(Exception):
    """A packed task that cannot run here."""


def pack(task: Task, code: Sequence[str] = ()) -> Packed:
    """Pack a task. Paths into its folders refer to packed files."""
    folders = tuple(folder.resolve() for folder in task.folders)
    out = io.BytesIO()
    _Pickler(out, folders).dump(task)
    contents = tuple(
        {name: path.read_bytes() for name, path in _files(folder)} for folder in folders
    )
    return Packed(
        out.getvalue(), contents, _digest(out.getvalue(), contents), package_digest(), tuple(code)
    )


def unpack(packed: Packed, place: Path) -> Task:
    """Unpack a task, with its files in folders of `place`. Raises `Refused` for wrong digests."""
    if _digest(packed.task, packed.folders) != packed.digest:
        raise Refused("a task changed on its way")
    folders = []
    for number, contents in enumerate(packed.folders):
        folders.append(place / str(number))
        for name, content in contents.items():
            path = folders[-1] / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    task: Task = _Unpickler(io.BytesIO(packed.task), folders).load()
    return task


@cache
def package_digest() -> str:
    """Return the digest of the modules of this kgen."""
    found = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        content = path.read_bytes()
        found.update(f"{path.relative_to(PACKAGE).as_posix()}\n{len(content)}\n".encode() + content)
    return found.hexdigest()


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO, folders: Sequence[Path]) -> None:
        super().__init__(out)
        self.folders = folders

    def persistent_id(self, obj: Any) -> tuple[int, str] | None:
        """Return the number of a folder and the rest, for a path into it."""
        if isinstance(obj, Path):
            for number, folder in enumerate(self.folders):
                if obj.is_absolute() and obj.is_relative_to(folder):
                    return number, obj.relative_to(folder).as_posix()
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, packed: io.BytesIO, folders: Sequence[Path]) -> None:
        super().__init__(packed)
        self.folders = folders

    def persistent_load(self, pid: tuple[int, str]) -> Path:
        """Return the path on this machine."""
        number, rest = pid
        return self.folders[number] / rest


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield all files of a folder except Python's caches."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and "__pycache__" not in name.parts:
            yield name.as_posix(), path


def _digest(task: bytes, folders: Sequence[dict[str, bytes]]) -> str:
    found = hashlib.sha256(task)
    for contents in folders:
        for name, content in sorted(contents.items()):
            found.update(f"\n{name}\n{len(content)}\n".encode() + content)
    return found.hexdigest()
