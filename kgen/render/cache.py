"""A cache of specs that are up to date, so that rendering them again costs a few reads.

An entry is valid while its inputs are unchanged: the bytes of the spec and of every file in the
output. The sources, templates and libraries of kgen are inputs by path, size and time. The cache is
the folder `.kgen-cache/` next to the output directory, and may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kgen import files as kept
from kgen.diagnostics import Diagnostic, KgenError
from kgen.render import environment, manifest

if TYPE_CHECKING:
    from kgen.render.writer import Output

LIBRARIES = ("jinja2", "pydantic", "sympy")


def lookup(spec: Path, generated: Path) -> tuple[Output, ...] | None:
    """Return the files of a spec from disk if they are up to date, else None."""
    from kgen.render.writer import Output

    path = _entry_path(spec, generated)
    folder, hint = path.parent, f"remove {path.parent}"
    if folder.exists() and not folder.is_dir():
        raise KgenError(
            Diagnostic("bad-cache", "the cache is not a directory", str(folder), 1, 1, hint=hint)
        )
    try:
        entry = kept.read_json(path, "bad-cache", hint)
        if entry["fingerprint"] != fingerprint() or entry["spec"] != _hash(kept.read(spec)):
            return None
        outputs = []
        for folder, hashes in entry["folders"].items():
            files: dict[str, str] = {}
            for name, expected in hashes.items():
                data = kept.read(generated / folder / name)
                if _hash(data) != expected:
                    return None
                files[name] = data.decode()
            outputs.append(Output(spec, folder, files))
        if not all((generated / name).exists() for name in entry["started"]):
            return None
        return tuple(outputs)
    except (OSError, kept.NotJsonError, ValueError, KeyError, TypeError, AttributeError):
        return None


def store(
    outputs: Sequence[Output], spec_text: str, generated: Path, started: Iterable[str] = ()
) -> None:
    """Record that `outputs`, all files of `spec_text`, and the `started` files are on disk.

    Errors are ignored.
    """
    path = _entry_path(outputs[0].spec, generated)
    entry = {
        "fingerprint": fingerprint(),
        "spec": _hash(spec_text.encode()),
        "folders": {
            output.name: {name: _hash(text.encode()) for name, text in output.files.items()}
            for output in outputs
        },
        "started": sorted(started),
    }
    _write(path, json.dumps(entry))


def keep(kind: str, key: str, text: str, generated: Path) -> None:
    """Store a text under a key. Errors are ignored."""
    _write(_folder(generated) / f"{kind}-{key[:24]}.json", text)


def recalled(kind: str, key: str, generated: Path) -> str | None:
    """Return the text under a key; None on a cache miss."""
    try:
        return kept.read(_folder(generated) / f"{kind}-{key[:24]}.json").decode()
    except (OSError, ValueError):
        return None


def _write(path: Path, text: str) -> None:
    temporary = kept.temporary(path)
    try:
        path.parent.mkdir(exist_ok=True)
        ignore = path.parent / ".gitignore"
        if not ignore.exists() or not ignore.stat().st_size:  # a killed process may leave it empty
            ignore.write_text("*\n", encoding="utf-8")
        _sweep(path.parent)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)


@cache
def _sweep(folder: Path) -> None:
    """Delete temporary files of killed processes, once per process."""
    kept.sweep(folder)


@cache
def fingerprint() -> str:
    """Return a hash of all inputs of rendering except the spec."""
    parts = [sys.version]
    for path in _inputs():
        stat = os.stat(path)
        parts.append(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}")
    return _hash("\n".join(parts).encode())


def _inputs() -> Iterator[str]:
    yield from _walk(str(environment.PACKAGE), (".py", ".json"))
    yield from _walk(str(environment.template_root()), "")
    for library in LIBRARIES:
        found = find_spec(library)  # Finds a package without importing it.
        if found is not None and found.origin is not None:
            yield found.origin


def _walk(root: str, suffix: str | tuple[str, ...]) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        yield from (os.path.join(folder, name) for name in sorted(files) if name.endswith(suffix))


def _entry_path(spec: Path, generated: Path) -> Path:
    out = Path(os.path.realpath(generated))
    key = _hash(os.fsencode(f"{out.name}\0{manifest.relative_spec(spec, out)}"))[:24]
    return _folder(out) / f"{key}.json"


def _folder(generated: Path) -> Path:
    return Path(os.path.realpath(generated)).parent / ".kgen-cache"


def digest(text: str) -> str:
    """Return the SHA-256 of a text, in hex digits."""
    return _hash(text.encode())


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
