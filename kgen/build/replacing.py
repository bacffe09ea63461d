"""Replace a built package: build in a folder next to it, then rename the complete folder."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kgen.diagnostics import Diagnostic, KgenError
from kgen.render.writer import os_errors
from kgen.verify.packages import MANIFEST, altered, manifest_of


def require_replaceable(out: Path, names: Sequence[str], *, force: bool = False) -> None:
    """Raise `KgenError` if a package would replace files that `kgen build` did not write.

    With `force`, only symbolic links raise.
    """
    wrong = [problem for name in names if (problem := _in_its_place(out, name, force))]
    if wrong:
        raise KgenError(wrong)


def _in_its_place(out: Path, name: str, force: bool) -> Diagnostic | None:
    place = out / name
    others = "choose another folder with `-o`, or pass `--force` to replace it"
    if place.is_symlink():
        return Diagnostic("link", "`kgen build` does not replace symbolic links", str(place))
    if force or not place.exists():
        return None
    try:
        manifest = manifest_of(out, name)
        made = {*manifest["files"], *(row["file"] for row in manifest["kernels"]), MANIFEST}
        edited = altered(out, name)
    except (KgenError, OSError):
        return Diagnostic(
            "not-a-package", "`kgen build` did not write this", str(place), hint=others
        )
    if edited:
        return Diagnostic(
            "edited", "the file was edited after the build", str(place / edited[0]), hint=others
        )
    for path in sorted(place.rglob("*")):
        if (
            path.is_file()
            and "__pycache__" not in path.parts
            and path.relative_to(place).as_posix() not in made
            and not _is_compiled(path.relative_to(place))
        ):
            return Diagnostic(
                "not-a-package", "`kgen build` did not write this file", str(path), hint=others
            )
    return None


def _is_compiled(path: Path) -> bool:
    """True for operators that a user compiled with the package's own command."""
    return path.match("operators/torch-*.so")


@contextmanager
def unfinished(out: Path, names: Sequence[str]) -> Iterator[dict[str, Path]]:
    """Create a folder for each package, with a random name; delete those that were not renamed by
    `put`.
    """
    folders = {name: _beside(out / name, "unfinished") for name in names}
    try:
        with os_errors():
            for folder in folders.values():
                folder.mkdir(parents=True)
        yield folders
    finally:
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)


def put(folder: Path, place: Path) -> None:
    """Rename a complete package to its place, then delete the one that was there."""
    before = _beside(place, "before")
    with os_errors():
        if place.exists():
            place.rename(before)
        try:
            folder.rename(place)
        except OSError:
            if before.exists():
                before.rename(place)
            raise
    if before.is_dir():
        shutil.rmtree(before, ignore_errors=True)
    else:
        before.unlink(missing_ok=True)


def _beside(place: Path, what: str) -> Path:
    return place.with_name(f".{place.name}.{uuid.uuid4().hex[:12]}.{what}")
