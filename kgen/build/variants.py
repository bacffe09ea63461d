"""Files that choose among the packages of a spec with several dtypes or head dims."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError
from kgen.render.header import is_untouched
from kgen.render.rendering import render_choice
from kgen.render.writer import os_errors
from kgen.verify.packages import MANIFEST, manifest_of

Texts = Mapping[Path, str]


def choosers(specs: Iterable[tuple[Any, Collection[str]]], out: Path) -> Texts:
    """Return the path and text of each file that chooses among packages of a spec with variants.

    `specs` has each variant with the names of the files in its package.
    """
    variants: dict[str, list[tuple[Any, Collection[str]]]] = {}
    for one, files in specs:
        if one.variant:
            variants.setdefault(one.spec.name, []).append((one, files))
    return {
        out / name / file: text
        for name, some in variants.items()
        for file, text in render_choice(some).items()
    }


def require_choosers_replaceable(texts: Texts, *, force: bool = False) -> None:
    """Raise `KgenError` if one would replace a file that `kgen build` did not write."""
    others = "choose another folder with `-o`, or pass `--force` to replace it"
    for place in texts:
        if place.is_symlink():
            raise KgenError(
                Diagnostic("link", "`kgen build` does not replace symbolic links", str(place))
            )
        if not force and place.exists() and not _is_one(place):
            raise KgenError(
                Diagnostic("edited", "the file was edited after the build", str(place), hint=others)
            )


def _is_one(place: Path) -> bool:
    try:
        return is_untouched(place.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return False


def write_choosers(texts: Texts) -> None:
    """Write each file whose folder has packages to choose from."""
    with os_errors():
        for place, text in texts.items():
            if any(place.parent.glob(f"*/{MANIFEST}")):
                place.write_text(text, encoding="utf-8", newline="\n")


def stale_choosers(loaded: Iterable[Any], out: Path) -> Iterator[str]:
    """Yield what is wrong with these files of existing packages, each as `NAME: reason`."""
    built = [(one, files) for one in loaded if one.variant and (files := _sources(out, one.folder))]
    for place, text in choosers(built, out).items():
        there = place.is_file()
        if not there or place.read_bytes() != text.encode():
            yield (
                f"{place.parent.name}: {place.name} "
                f"{'was edited after the build' if there else 'is missing'}"
            )


def _sources(out: Path, name: str) -> Collection[str]:
    """Return the files that a package is built from; none if its manifest cannot be read, which
    `stale` reports.
    """
    try:
        return list(manifest_of(out, name)["sources"])
    except KgenError:
        return ()
