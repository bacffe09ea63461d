"""Write rendered texts to disk: compute a list of changes, then apply all of them or none.

A file is written under a temporary name and moved, so readers never see half a file. A file that a
user edited is overwritten or deleted only with `force`. Files that kgen did not write stay as they
are.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from kgen import files
from kgen.diagnostics import Diagnostic, DriftError, KgenError
from kgen.render import manifest
from kgen.render.header import body_hash, is_untouched
from kgen.render.manifest import MANIFEST, Manifest

DEPTH = 5
"""Largest depth of folders: a variant of a spec, below `REPOSITORY/torch-ext/PACKAGE/_kernels`."""

State = Literal["new", "changed", "unchanged", "pruned", "edited"]


@dataclass(frozen=True)
class Output:
    """A folder of a spec.

    `name` is relative to the output directory: `causal`, or `causal/bf16_d64` for a variant.
    """

    spec: Path
    name: str
    files: Mapping[str, str]
    whole: bool = True
    """False if only some targets are rendered."""
    proved: bool | None = None
    """False if no proof was made before. None keeps the value in the manifest."""


@dataclass(frozen=True)
class Change:
    """The change of one path. `text` is its content; None if no spec makes the file.

    An `edited` file was changed by a user: it is written or deleted only with `force`.
    """

    path: Path
    state: State
    text: str | None
    old: bytes | None
    why: str = ""

    @property
    def is_manifest(self) -> bool:
        """True for a manifest, which summaries do not count."""
        return self.path.name == MANIFEST


def compute_changes(
    outputs: Sequence[Output],
    generated: Path,
    started: Mapping[str, str] = MappingProxyType({}),
    *,
    others: bool = True,
) -> list[Change]:
    """Return the changes that bring the disk to `outputs`, including unchanged files.

    Without `others`, only the folders of `outputs` are compared. `started` are files by path that
    are written only if they are missing.
    """
    with os_errors():
        made = _made(outputs)
        _refuse_shared_names(outputs, made, generated)
        there = ((generated / name, text) for name, text in started.items())
        changes = [
            Change(path, "new", text, None) for path, text in there if not os.path.lexists(path)
        ]
        for output in outputs:
            changes += _directory_changes(output, generated / output.name)
        names = {output.name for output in outputs}
        own = {name.partition("/")[0] for name in names}
        for folder in folders(generated):
            name = folder.relative_to(generated).as_posix()
            if name not in names and (others or name.partition("/")[0] in own):
                changes += _orphan_changes(folder, made)
        return changes


def folders(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Yield the folders that kgen wrote, inner ones first. Symbolic links are skipped."""
    inside: list[Path] = []
    with suppress(FileNotFoundError):  # it does not exist yet, or another process has deleted it
        inside = sorted(folder.iterdir()) if depth else []
    for path in inside:
        if path.is_dir() and not path.is_symlink():
            yield from folders(path, depth - 1)
            if (path / MANIFEST).exists():
                yield path


def file_changes(output: Output, generated: Path) -> list[Change]:
    """Return the changes of the files in one folder of a spec, including unchanged files, without
    the manifest.
    """
    directory = generated / output.name
    with os_errors():
        changes = [
            _file_change(directory / name, text) for name, text in sorted(output.files.items())
        ]
        return [*changes, *_pruned(directory, set(output.files), f"{output.spec} does not make it")]


def compute_single_changes(outputs: Sequence[Output], folder: Path) -> list[Change]:
    """Return the changes for specs with a single file each, directly in the folder.

    There is no manifest.
    """
    with os_errors():
        _refuse_shared_names(outputs, _made(outputs), folder)
        return [
            _file_change(folder / name, text) for o in outputs for name, text in o.files.items()
        ]


def hidden(changes: Iterable[Change]) -> list[str]:
    """Warnings about single files that Python cannot import: it prefers a package of the same
    name.
    """
    return [
        f"`{change.path.as_posix()}` is hidden by the folder `{package.as_posix()}/`, which Python "
        "imports instead: "
        "write the file to another folder with `--output`, or remove that one"
        for change in changes
        if (package := change.path.with_suffix("")).joinpath("__init__.py").is_file()
    ]


def apply(changes: Iterable[Change], *, force: bool = False) -> None:
    """Write, replace and delete files.

    Without `force`, raise `DriftError` first if an edit would be lost. Also delete the temporary
    files that a killed process left.
    """
    every = list(changes)
    changes = [change for change in every if change.state != "unchanged"]
    if not force:
        refuse_edited(changes)
    # The manifest goes last: after an interruption, the old one still lists every file.
    writes = sorted(
        (c for c in changes if c.text is not None), key=lambda change: change.is_manifest
    )
    deletes = sorted((c for c in changes if c.text is None), key=lambda change: change.is_manifest)
    temporary: list[tuple[Path, Path]] = []
    with os_errors():
        try:
            for change in writes:
                change.path.parent.mkdir(parents=True, exist_ok=True)
                beside = files.temporary(change.path)
                temporary.append((beside, change.path))
                with os_errors(change.path):
                    beside.write_bytes((change.text or "").encode())
            for beside, path in temporary:
                os.replace(beside, path)
        finally:
            for beside, _ in temporary:
                beside.unlink(missing_ok=True)
        for change in deletes:
            change.path.unlink(missing_ok=True)
        _sweep(every)
        emptied = {change.path.parent for change in deletes}
        for directory in sorted(emptied, key=lambda path: len(path.parts), reverse=True):
            with suppress(OSError):  # it contains files of the user
                directory.rmdir()


def _sweep(changes: Iterable[Change]) -> None:
    """Delete temporary files that a killed process left. A folder without a manifest may be of the
    user, so only those of its files are deleted.
    """
    names: dict[Path, set[str]] = {}
    for change in changes:
        names.setdefault(change.path.parent, set()).add(change.path.name)
    for folder, of in names.items():
        files.sweep(folder, None if MANIFEST in of else of)


def drift(changes: Sequence[Change]) -> list[Change]:
    """Return the changes to print: a manifest only if no other file of its directory changes."""
    said = {c.path.parent for c in changes if c.state != "unchanged" and not c.is_manifest}
    return [
        c
        for c in changes
        if c.state != "unchanged" and not (c.is_manifest and c.path.parent in said)
    ]


def wanted(changes: Iterable[Change]) -> int:
    """Return the number of files to write, without manifests and files of the user."""
    return sum(change.text is not None and not change.is_manifest for change in changes)


def refuse_edited(changes: Iterable[Change]) -> None:
    """Raise `DriftError` if a change would lose an edit of the user."""
    diagnostics = [
        Diagnostic(
            "edited",
            f"{change.why}; it would be {'overwritten' if change.text is not None else 'deleted'}",
            file=str(change.path),
            hint="move the edit into the spec, or discard it with --force",
        )
        for change in changes
        if change.state == "edited"
    ]
    if diagnostics:
        raise DriftError(diagnostics)


def _made(outputs: Sequence[Output]) -> dict[Path, list[str]]:
    """Return the top-level folders of each spec."""
    found: dict[Path, list[str]] = {}
    for output in outputs:
        names = found.setdefault(Path(os.path.realpath(output.spec)), [])
        if (name := output.name.partition("/")[0]) not in names:
            names.append(name)
    return found


def _refuse_shared_names(
    outputs: Sequence[Output], made: Collection[Path], generated: Path
) -> None:
    """Raise `KgenError` if two specs have the same directory, or if a directory is a symbolic
    link.
    """
    diagnostics = []
    first: dict[str, Path] = {}
    for output in outputs:
        parts = output.name.split("/")
        if len(parts) > DEPTH or not all(part.replace("-", "_").isidentifier() for part in parts):
            raise ValueError(
                f"the name {output.name!r} of a spec is not a directory below the output"
            )
        directory = generated / output.name
        other = first.setdefault(output.name, output.spec)
        if other is output.spec:
            recorded = manifest.read(directory)
            path = (
                recorded.spec_path(directory) if recorded else Path(os.path.realpath(output.spec))
            )
            if path not in made and path.is_file():
                other = Path(os.path.relpath(path))
        if other is not output.spec:
            diagnostics.append(
                Diagnostic(
                    "name-taken",
                    f"the name `{output.name}` belongs to {other}, which makes {directory}",
                    file=str(output.spec),
                    hint="give the spec another `name`; if the other spec was renamed, render both",
                )
            )
        if any(generated.joinpath(*parts[: n + 1]).is_symlink() for n in range(len(parts))):
            diagnostics.append(
                Diagnostic("link", "the output directory is a symbolic link", file=str(directory))
            )
    if diagnostics:
        raise KgenError(diagnostics)


def _directory_changes(output: Output, directory: Path) -> list[Change]:
    """Return the changes of the files of a spec, of its obsolete files, and of the manifest."""
    changes = [_file_change(directory / name, text) for name, text in sorted(output.files.items())]
    hashes = {name: body_hash(text) or "" for name, text in output.files.items()}
    if output.whole:
        changes += _pruned(directory, set(output.files), f"{output.spec} does not make it")
    elif old := manifest.read(directory):
        hashes = {**old.files, **hashes}
    if hashes:
        there = manifest.read(directory)
        proved = output.proved if output.proved is not None else there is None or there.proved
        made = Manifest(manifest.relative_spec(output.spec, directory), hashes, proved=proved)
        changes.append(_manifest_change(directory / MANIFEST, made, there))
    return changes


def _orphan_changes(directory: Path, made: Mapping[Path, Sequence[str]]) -> list[Change]:
    """Return the deletions in a directory that no spec makes: its spec is gone, or makes other
    directories.
    """
    recorded = manifest.read(directory)
    if recorded is None:
        return []
    spec = recorded.spec_path(directory)
    if spec not in made and spec.is_file():
        return []
    now = ", ".join(f"`{name}`" for name in made.get(spec, ()))
    why = f"its spec makes {now}" if now else f"its spec {spec.name} is gone"
    old = _read(directory / MANIFEST)
    return [*_pruned(directory, set(), why), Change(directory / MANIFEST, "pruned", None, old, why)]


def _pruned(directory: Path, kept: set[str], why: str) -> Iterator[Change]:
    for name in manifest.listed(directory):
        path = directory / name
        if name in kept:
            continue
        old = _read(path)
        if old is None and not path.is_symlink():  # another process may have deleted it
            continue
        old = old or b""
        if edit := _edit(path, old):
            yield Change(path, "edited", None, old, edit)
        else:
            yield Change(path, "pruned", None, old, why)


def _file_change(path: Path, text: str) -> Change:
    old = _read(path)
    if old is None and not path.is_symlink():
        return Change(path, "new", text, None)
    old = old or b""
    if old == text.encode() and not path.is_symlink():
        return Change(path, "unchanged", text, old)
    if edit := _edit(path, old):
        return Change(path, "edited", text, old, edit)
    return Change(path, "changed", text, old)


def _manifest_change(path: Path, made: Manifest, there: Manifest | None) -> Change:
    old = _read(path)
    if there is not None and old == replace(made, kgen=there.kgen).text().encode():
        made = replace(made, kgen=there.kgen)
    text = made.text()
    state: State = "new" if old is None else "unchanged" if old == text.encode() else "changed"
    return Change(path, state, text, old)


def _read(path: Path) -> bytes | None:
    """Return the content of a file; None if it does not exist."""
    try:
        content = files.read(path)
    except FileNotFoundError:
        return None
    if len(content) > files.MAX_RECORD:
        message = f"the file has more than {files.MAX_RECORD} bytes, so kgen did not write it"
        raise KgenError(Diagnostic("too-large", message, str(path), hint="move the file away"))
    return content


def _edit(path: Path, old: bytes) -> str | None:
    """Return how a file on disk differs from a file that kgen wrote; None if it does not."""
    if path.is_symlink():
        return "the file is a symbolic link"
    text = old.decode("utf-8", "replace")
    if is_untouched(text):
        return None
    if body_hash(text.replace("\r\n", "\n")) is None:
        return "the file has no header of kgen"
    return "the file was edited by hand: its body does not match the hash in its header"


@contextmanager
def os_errors(path: Path | None = None) -> Iterator[None]:
    """Turn an `OSError` into a `KgenError`, because the user has to fix its cause.

    It names `path`, or the file of the error. The error of a full disk has no file.
    """
    try:
        yield
    except OSError as error:
        place = path or error.filename
        file = str(place) if place else None
        raise KgenError(Diagnostic("io", error.strerror or str(error), file=file)) from error
