"""A spec with variants has a package for each, and beside them what chooses one, as it was rendered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError
from kgen.render.header import is_untouched
from kgen.render.writer import os_errors

INIT = "__init__.py"


def choosers(loaded: Sequence[Any], generated: Path, out: Path) -> dict[Path, str]:
    """What chooses among variants of specs: where it goes, and its text."""
    names = {one.spec.name for one in loaded if one.variant}
    there = {name: path for name in names if (path := generated / name / INIT).is_file()}
    return {out / name / INIT: path.read_text(encoding="utf-8") for name, path in sorted(there.items())}


def require_choosers_replaceable(choosers: dict[Path, str], *, force: bool = False) -> None:
    """Raise `KgenError` where one would take the place of what `kgen build` did not put there."""
    others = "name another folder with `-o`, or `--force` to replace it"
    for place in choosers:
        if place.is_symlink():
            raise KgenError(
                Diagnostic("link", "a file would be put in the place of a symbolic link", str(place))
            )
        if not force and place.exists() and not _is_one(place):
            raise KgenError(Diagnostic("edited", "the file is not what was built", str(place), hint=others))


def _is_one(place: Path) -> bool:
    try:
        return is_untouched(place.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return False


def write_choosers(choosers: dict[Path, str]) -> None:
    """Put each where there are packages that it chooses from."""
    with os_errors():
        for place, text in choosers.items():
            if place.parent.is_dir():
                place.write_text(text, encoding="utf-8", newline="\n")


def stale_choosers(choosers: dict[Path, str]) -> Iterator[str]:
    """What is wrong with those that are there, each as a sentence that begins with the spec's name."""
    for place, text in choosers.items():
        there = place.is_file()
        if not there or place.read_bytes() != text.encode():
            yield f"{place.parent.name}: {INIT} is {'not what was rendered' if there else 'not there'}"
