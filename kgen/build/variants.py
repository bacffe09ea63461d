"""The files that choose among the packages of a spec with variants, as its emitted folder has them."""

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
    """What chooses among packages of specs with variants, each of which has these of its files: places, and texts."""
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
    """Raise `KgenError` where one would take the place of what `kgen build` did not put there."""
    others = "name another folder with `-o`, or `--force` to replace it"
    for place in texts:
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


def write_choosers(texts: Texts) -> None:
    """Put each where there are packages that it chooses from."""
    with os_errors():
        for place, text in texts.items():
            if any(place.parent.glob(f"*/{MANIFEST}")):
                place.write_text(text, encoding="utf-8", newline="\n")


def stale_choosers(loaded: Iterable[Any], out: Path) -> Iterator[str]:
    """What is wrong with those of packages that are there, each as a sentence that begins with the spec's name."""
    built = [(one, files) for one in loaded if one.variant and (files := _sources(out, one.folder))]
    for place, text in choosers(built, out).items():
        there = place.is_file()
        if not there or place.read_bytes() != text.encode():
            yield f"{place.parent.name}: {place.name} is {'not what was built' if there else 'not there'}"


def _sources(out: Path, name: str) -> Collection[str]:
    """The files that a package is made of; none where it cannot be read, which is said of it elsewhere."""
    try:
        return list(manifest_of(out, name)["sources"])
    except KgenError:
        return ()
